"""Parameters of which each rank holds a part: optimizer over the parts, and whole tensors from them.

A part is a range of elements of the flattened parameter. Ranges of the ranks are disjoint and cover it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from contracts.checkpoints import is_quantized
from trainer.backends.base import AdamWRule, Rule
from trainer.optimizers import AdamW, orthogonalize
from trainer.parameters import Buffer
from trainer.ranks import Ranks

MUON_MOMENTUM = 0.95
NO_GRADIENT = torch.empty(0)


@dataclass
class Shard:
    """This rank's part of a parameter."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    ranges: Sequence[tuple[int, int]]
    """Start and end of each rank's part."""
    buffer: Buffer
    """Master and gradient of this rank's part: float32 [elements]. The gradient is set before each step."""


def shard_of(name: str, shape: tuple[int, ...], ranges: Sequence[tuple[int, int]], master: Tensor) -> Shard:
    """master: this rank's part, float32 [elements], changed in place by the optimizer."""
    master = master.detach()
    spans: dict[str, tuple[int, int, tuple[int, ...]]] = {name: (0, len(master), (len(master),))}
    return Shard(name, shape, ranges, Buffer(name, master, master, NO_GRADIENT, spans))


def global_norm(shards: Sequence[Shard], ranks: Ranks) -> Tensor:
    """Norm of the gradients of all parts of all ranks, float32."""
    squares = torch.stack([shard.buffer.gradient.square().sum(dtype=torch.float64) for shard in shards]).sum()
    ranks.add(squares)
    return squares.sqrt().float()


class ShardedOptimizer:
    """The optimizer that `rule` names, with the formulas and the state of `trainer.optimizers`."""

    def __init__(self, shards: Sequence[Shard], rule: Rule, ranks: Ranks) -> None:
        self._shards, self._ranks = shards, ranks
        self._muon: ShardedMuon | None = None
        if isinstance(rule, AdamWRule):
            self._adamw_share = 1.0
            buffers = [shard.buffer for shard in shards]
            self._adamw = AdamW(buffers, rule.beta1, rule.beta2, rule.weight_decay)
        else:
            self._adamw_share, self._muon_share = rule.adamw_share, rule.muon_share
            self._muon = ShardedMuon([shard for shard in shards if is_quantized(shard.name)], ranks)
            self._adamw = AdamW([shard.buffer for shard in shards if not is_quantized(shard.name)], 0.9, 0.95)

    @torch.no_grad()
    def step(self, learning_rate: float, max_norm: float) -> Tensor:
        """Clip the gradients to the global norm `max_norm` and apply them once. Returns the norm before."""
        norm = global_norm(self._shards, self._ranks)
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for shard in self._shards:
            shard.buffer.gradient.mul_(factor)
        if self._muon is not None:
            self._muon.step(learning_rate * self._muon_share)
        self._adamw.step(learning_rate * self._adamw_share)
        for shard in self._shards:  # the library's memory, which the next step does not use
            shard.buffer.gradient = NO_GRADIENT
        return norm

    def state(self) -> dict[str, Tensor]:
        """State of this rank's parts, by the names of `trainer.optimizers`."""
        return (self._muon.state() if self._muon is not None else {}) | self._adamw.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned on this rank."""
        if self._muon is not None:
            self._muon.load(state)
        self._adamw.load(state)


class ShardedMuon:
    """Muon over parts: each matrix is orthogonalized as a whole, by one of the ranks."""

    def __init__(self, shards: Sequence[Shard], ranks: Ranks) -> None:
        self._shards, self._ranks = shards, ranks
        self._momenta = [torch.zeros_like(shard.buffer.master) for shard in shards]

    def step(self, learning_rate: float) -> None:
        """Apply the gradients once, with Nesterov momentum."""
        held: dict[int, Tensor] = {}
        for number, (shard, momentum) in enumerate(zip(self._shards, self._momenta, strict=True)):
            momentum.lerp_(shard.buffer.gradient, 1 - MUON_MOMENTUM)
            update = shard.buffer.gradient.lerp(momentum, MUON_MOMENTUM)
            whole = gather(update, shard, number % self._ranks.count, self._ranks)
            if whole is not None:
                held[number] = whole
        for number, whole in held.items():
            shape = self._shards[number].shape
            held[number] = orthogonalize(whole.view(-1, *shape[-2:])).reshape(-1)
        for number, shard in enumerate(self._shards):
            update = scatter(held.pop(number, None), shard, number % self._ranks.count, self._ranks)
            rows, columns = shard.shape[-2:]
            shard.buffer.master.sub_(update, alpha=learning_rate * max(1.0, rows / columns) ** 0.5)

    def state(self) -> dict[str, Tensor]:
        """`muon.momentum.<name>` for each parameter."""
        pairs = zip(self._shards, self._momenta, strict=True)
        return {f"muon.momentum.{shard.name}": momentum for shard, momentum in pairs}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        for shard, momentum in zip(self._shards, self._momenta, strict=True):
            momentum.copy_(state[f"muon.momentum.{shard.name}"])


def owners_of(shards: Sequence[Shard]) -> Callable[[str], Shard | None]:
    """Function from the name of an optimizer's tensor, `<slot>.<parameter>`, to the parameter's shard. None for numbers
    that all ranks share.
    """
    by_name = {shard.name: shard for shard in shards}

    def owner(name: str) -> Shard | None:
        parts = name.split(".")
        rests = (".".join(parts[start:]) for start in range(1, len(parts)))
        return next((by_name[rest] for rest in rests if rest in by_name), None)

    return owner


def parts_of(state: Mapping[str, Tensor], shards: Sequence[Shard], rank: int) -> dict[str, Tensor]:
    """A rank's parts of an optimizer's state of whole parameters, copied. Reads one tensor at a time."""
    owner, found = owners_of(shards), dict[str, Tensor]()
    for name, whole in state.items():
        shard = owner(name)
        found[name] = whole if shard is None else part_of(whole, shard, rank).clone()
    return found


def part_of(whole: Tensor, shard: Shard, rank: int) -> Tensor:
    """A rank's part, [elements], of a whole parameter or of a tensor of its shape."""
    start, end = shard.ranges[rank]
    return whole.reshape(-1)[start:end]


def gather(part: Tensor, shard: Shard, owner: int, ranks: Ranks) -> Tensor | None:
    """The whole tensor, [elements], on rank `owner`; None on the others. part: this rank's."""
    if ranks.rank != owner:
        if len(part):
            dist.send(part.contiguous(), owner)
        return None
    whole = part.new_empty(math.prod(shard.shape))
    for rank, (start, end) in enumerate(shard.ranges):
        if rank == owner:
            whole[start:end] = part
        elif end > start:
            dist.recv(whole[start:end], rank)
    return whole


def scatter(whole: Tensor | None, shard: Shard, owner: int, ranks: Ranks) -> Tensor:
    """This rank's part of a tensor that rank `owner` holds."""
    start, end = shard.ranges[ranks.rank]
    if ranks.rank != owner:
        part = torch.empty_like(shard.buffer.master)
        if end > start:
            dist.recv(part, owner)
        return part
    assert whole is not None, "the owner holds the tensor"
    for rank, (first, last) in enumerate(shard.ranges):
        if rank != owner and last > first:
            dist.send(whole[first:last], rank)
    return whole[start:end]
