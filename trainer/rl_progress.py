"""Position of an RL iteration between two minibatches, as a snapshot keeps it.

The log probabilities under the starting weights are part of a snapshot: the weights that gave them are gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from torch import Tensor

from contracts.store import Store
from trainer.config import RL_VERSION, RlConfig, RlJob
from trainer.flat import Ragged
from trainer.metrics import Record
from trainer.ranks import Ranks
from trainer.schedule import rate_factor
from trainer.snapshots import Snapshots
from trainer.state import TrainerState


@dataclass
class Start:
    """Numbers of every row under the iteration's starting weights: float32 [policy tokens] each."""

    logprobs: Sequence[Tensor]
    advantages: Sequence[Tensor] = ()
    values: Sequence[Tensor] = ()
    """Empty without a critic, as are `returns`."""
    returns: Sequence[Tensor] = ()

    @classmethod
    def empty(cls, sizes: np.ndarray, folder: Path | None, *, critic: bool) -> Self:
        """Zeros for rows of so many policy tokens. folder: see `flat_array`."""
        return cls(Ragged.zeros(sizes, folder), values=Ragged.zeros(sizes, folder) if critic else ())

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], sizes: np.ndarray) -> Self:
        """What `tensors` returned, without advantages. sizes: policy tokens of each row."""
        found = {name: Ragged(tensor.numpy(), sizes) for name, tensor in tensors.items()}
        return cls(found["start.logprobs"], values=found.get("start.values", ()))

    def tensors(self) -> dict[str, Tensor]:
        """What `restored` needs; advantages and returns follow from it."""
        found = {"start.logprobs": self.logprobs, "start.values": self.values}
        return {name: values.flat for name, values in found.items() if isinstance(values, Ragged)}


@dataclass
class Progress:
    """Position of an iteration between two minibatches."""

    before: int
    """Optimizer steps before the iteration, since the base policy began."""
    learned: int = 0
    """Those of earlier iterations."""
    done: int = 0
    """Minibatches of the iteration that are done."""
    taken: int = 0
    """Optimizer steps of the iteration; skipped minibatches take none."""
    records: list[Record] = field(default_factory=list)
    """Metrics so far."""
    start: Mapping[str, Tensor] = field(default_factory=dict)
    """`Start.tensors`; empty at the begin of the iteration."""

    @classmethod
    def of(cls, state: TrainerState) -> Self:
        """Position in a snapshot, or the begin of an iteration that starts from the trainer state `state`."""
        if state.loop:
            return cls(**state.extra, start=state.loop)
        steps = state.optimizer.get("adamw.step")
        return cls(state.step, 0 if steps is None else int(steps))

    @property
    def step(self) -> int:
        """Optimizer steps since the base policy began."""
        return self.before + self.taken

    def learning_rate(self, config: RlConfig) -> float:
        """Learning rate of the next optimizer step."""
        step, end = self.learned + self.taken, config.schedule_steps or 0
        return config.learning_rate * rate_factor(config.schedule, step, config.warmup_steps, end, config.final_rate)

    def extra(self, records: list[Record]) -> dict[str, object]:
        """JSON from which `of` continues. records: metrics so far."""
        counts = {"before": self.before, "learned": self.learned}
        return {**counts, "done": self.done, "taken": self.taken, "records": records}


def open_snapshots(job: RlJob, store: Store, ranks: Ranks) -> Snapshots:
    """Snapshots of `job`, between its minibatches."""
    inputs = {"dataset": job.dataset, "checkpoint": job.checkpoint, "trainer_state": job.trainer_state}
    config = {**job.config.model_dump(), "inputs": {name: ref.digest for name, ref in inputs.items()}}
    last = job.config.optimizer_steps - 1
    return Snapshots(store, job.key, job.config.snapshot_every, last, config, RL_VERSION, ranks)
