"""Processes that train one job together. Each computes its share of every batch; sums over all of them make every
process take the same step.

A process is a rank if `WORLD_SIZE` is above 1: `trainer.agent` sets it, or `torchrun`.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.devices import CPU
from trainer.errors import RanksLost, TrainingConfigError
from trainer.lifetime import MEETING_VARIABLE
from trainer.nodes import meet_ranks, this_node

_Item = TypeVar("_Item")


class Ranks:
    """This process among those of its job, and its device; by default alone, on the CPU."""

    def __init__(
        self,
        rank: int = 0,
        count: int = 1,
        device: torch.device = CPU,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        """group: through which the ranks communicate; torch's default group if None. timeout: see `join_ranks`."""
        self.rank, self.count, self.device, self._group, self._timeout = rank, count, device, group, timeout
        self.aside = self
        """The same ranks for a thread of its own beside the one that trains."""

    @property
    def leads(self) -> bool:
        """Whether this process reports and publishes."""
        return self.rank == 0

    def share(self, items: Sequence[_Item]) -> list[_Item]:
        """This rank's part of `items`; may be empty."""
        return list(items[self.rank :: self.count])

    def deal(self, sizes: Sequence[int]) -> list[int]:
        """Rank of each item, the same on all ranks: in order, the one with the least so far. A rank gets at most its
        share and the largest item more.
        """
        heap, owners = [(0, rank) for rank in range(self.count)], []
        for size in sizes:
            held, rank = heap[0]
            heapq.heapreplace(heap, (held + size, rank))
            owners.append(rank)
        return owners

    def add(self, *tensors: Tensor) -> None:
        """Replace each tensor, in place, by its sum over all ranks. Raises RanksLost."""
        for tensor in tensors:
            self._sum(tensor)

    def total(self, *values: float) -> list[float]:
        """Sum over all ranks of each value, in float64. Raises RanksLost."""
        sums = torch.tensor(values, dtype=torch.float64)
        self._sum(sums)
        return [float(each) for each in sums]

    def largest(self, value: int) -> int:
        """Largest value of all ranks. Raises RanksLost."""
        found = torch.tensor(value)
        if self.count > 1:
            with losing_ranks(self):
                dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        return int(found)

    def tell(self, words: str) -> str:
        """What rank 0 passed. Raises RanksLost."""
        told = [words]
        if self.count > 1:
            with losing_ranks(self):
                dist.broadcast_object_list(told, 0, group=self._group)
        return told[0]

    def exchange(self, words: str) -> list[str]:
        """What every rank passed, by rank. Raises RanksLost."""
        found = [words] * self.count
        if self.count > 1:
            with losing_ranks(self):
                dist.all_gather_object(found, words, group=self._group)
        return found

    def meet(self) -> None:
        """Wait until every rank is here. Raises RanksLost."""
        self.total(0.0)

    def divide(self, size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """(this rank's group of `size` consecutive ranks, ranks of the same place in all groups). size divides the
        count. All ranks must call it. Raises RanksLost.
        """
        near = [list(range(start, start + size)) for start in range(0, self.count, size)]
        far = [list(members) for members in zip(*near, strict=True)]
        with losing_ranks(self):
            groups = [[dist.new_group(each, timeout=self._timeout) for each in lists] for lists in (near, far)]
        return groups[0][self.rank // size], groups[1][self.rank % size]

    def _sum(self, tensor: Tensor) -> None:
        if self.count > 1:
            with losing_ranks(self):
                dist.all_reduce(tensor, group=self._group)


@contextmanager
def losing_ranks(ranks: Ranks) -> Iterator[None]:
    """Turn errors of the communication between ranks into RanksLost."""
    try:
        yield
    except RuntimeError as error:  # gloo has no error class of its own; NCCL's is a DistError
        words = str(error).strip().splitlines() or [repr(error)]
        if ranks.count == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise RanksLost(ranks.rank, ranks.count, words[0]) from None


ALONE = Ranks()


@contextmanager
def join_ranks(expected: int, timeout_s: float, *, group: bool = False, device: torch.device = CPU) -> Iterator[Ranks]:
    """Meet the other ranks. timeout_s: longest wait for another rank, in every operation. group: make a process group
    even for one rank, for a backend that needs one. Sums of GPU tensors go through NCCL, all others through gloo.

    Raises TrainingConfigError if the environment has another number of processes than the job's `expected`.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count != expected:
        raise TrainingConfigError(f"job field ranks is {expected}, but {count} processes were started: make them equal")
    if count == 1 and not group:
        yield Ranks(device=device)
        return
    rank = int(os.environ.get("RANK", "0"))
    meeting = os.environ.get(MEETING_VARIABLE)
    place: dict[str, Any] = {"init_method": f"file://{meeting}" if meeting else "env://"}
    if count == 1:
        place = {"store": dist.HashStore()}  # type: ignore[attr-defined]
    limit, node = timedelta(seconds=timeout_s), this_node()
    try:
        if node is not None and node.several:
            place = {"store": meet_ranks(node, rank, count, limit)}
        name = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(name, rank=rank, world_size=count, timeout=limit, **place)
    except RuntimeError as error:
        raise RanksLost(rank, count, str(error).splitlines()[0]) from None
    try:
        ranks = Ranks(rank, count, device, timeout=limit)
        with losing_ranks(ranks):
            ranks.aside = Ranks(rank, count, device, dist.new_group(backend="gloo", timeout=limit))
        yield ranks
    finally:
        dist.destroy_process_group()
