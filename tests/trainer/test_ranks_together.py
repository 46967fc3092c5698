"""Ranks that are slower than the others by more than the time after which a rank counts as lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from trainer_world import TINY, backend_of

from contracts.store import LocalStore
from trainer.backends.torch import TorchBackend
from trainer.data import ScoredSequence
from trainer.errors import RanksLost, TrainingStopped
from trainer.lifetime import MEETING_VARIABLE
from trainer.model import Batch, Scores
from trainer.parameters import Parameters, draw_masters
from trainer.ranks import Ranks, join_ranks
from trainer.snapshots import Snapshots
from trainer.state import TrainerState
from trainer.together import together

TIMEOUT_S, WRITE_S, PASS_S, PASSES = 3.0, 4.0, 0.3, 12
SEQUENCE = ScoredSequence(np.arange(4), np.array([2, 3]))
Task = Callable[[Ranks, Path], None]


def run_rank(task: Task, rank: int, folder: Path, ready: Barrier) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ[MEETING_VARIABLE] = str(folder / "meeting")
    torch.set_num_threads(1)
    ready.wait(120)
    with join_ranks(2, TIMEOUT_S) as ranks:
        task(ranks, folder)


def run_ranks(task: Task, folder: Path) -> list[int | None]:
    """Exit codes of two ranks that do `task`."""
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Barrier(2)
    every = [spawn.Process(target=run_rank, args=(task, rank, folder, ready)) for rank in range(2)]
    for process in every:
        process.start()
    for process in every:
        process.join(120)
    return [process.exitcode for process in every]


def unlike_passes(ranks: Ranks, folder: Path) -> None:
    """Rank 1 has more microbatches, each within the limit."""
    config = TINY.hf_config(264, 1)
    parameters = Parameters.from_masters(config, draw_masters(config, 0))
    backend = TorchBackend(parameters, backend_of(parameters)._rule, ranks)
    microbatches = [[SEQUENCE]] * (PASSES if ranks.rank else 1)

    def read(number: int, batch: Batch, scores: Scores) -> None:
        time.sleep(PASS_S if ranks.rank else 0)

    def loss(number: int, batch: Batch, scores: Scores) -> Tensor:
        read(number, batch, scores)
        return -scores.logprobs.sum()

    backend.forward(microbatches, read).result()
    assert ranks.total(1.0) == [2.0]
    backend.forward_backward(microbatches, loss).result()
    assert backend.optim_step(1e-3, 1.0).result() > 0


class SlowStore(LocalStore):
    """A store that writes a manifest for longer than the ranks wait for a lost one."""

    def create(self, key: str, data: bytes, *, cached: bool = False) -> bool:
        """See Store.create."""
        time.sleep(WRITE_S)
        return super().create(key, data, cached=cached)


def slow_snapshots(ranks: Ranks, folder: Path) -> None:
    with Snapshots(SlowStore(folder), "0" * 64, 1, 10, {}, "1", ranks) as snapshots:
        for step in (1, 2):
            snapshots.save(TrainerState({}, {"adamw.step": torch.zeros(4)}, "adamw", step, {}), step)
            assert ranks.total(1.0) == [2.0]


def failing_work(ranks: Ranks, folder: Path) -> None:
    if ranks.rank:
        with pytest.raises(ValueError, match="too steep"), together(ranks):
            raise ValueError("too steep")
    else:
        with pytest.raises(RanksLost, match=r"rank 0 of 2 lost .*rank 1 failed: too steep"), together(ranks):
            pass


def waiting_rank_is_stopped(ranks: Ranks, folder: Path) -> None:
    """Rank 0 has ended its own work and waits for rank 1 when it gets SIGTERM."""

    def stop(number: int, _: object) -> None:
        raise TrainingStopped(number)

    if ranks.rank:
        with pytest.raises(RanksLost, match=r"rank 1 of 2 lost .*rank 0 failed: .*SIGTERM"), together(ranks):
            time.sleep(WRITE_S)
    else:
        signal.signal(signal.SIGTERM, stop)
        threading.Timer(WRITE_S / 2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(TrainingStopped), together(ranks):
            pass


@pytest.mark.parametrize(
    "task",
    [
        failing_work,
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (unlike_passes, slow_snapshots, waiting_rank_is_stopped)
        ),
    ],
)
def test_ranks_await_a_slow_one_but_not_a_failed_one(task: Task, tmp_path: Path) -> None:
    assert run_ranks(task, tmp_path) == [0, 0]
