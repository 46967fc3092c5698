"""Run a job of either kind, or return the result that already exists."""

from __future__ import annotations

from collections.abc import Iterable

from contracts.artifacts import find_artifact
from contracts.store import open_store
from trainer.config import RlJob, SftJob
from trainer.metrics import Watcher
from trainer.result import TrainResult
from trainer.rl import train_rl
from trainer.runtime import make_deterministic
from trainer.sft import train_sft


def run_job(job: SftJob | RlJob, watchers: Iterable[Watcher] = ()) -> TrainResult:
    """Result of the job; committed artifacts are reused. Raises TriplaneError."""
    store = open_store(job.store)
    checkpoint = find_artifact(store, "checkpoint", job.key)
    state = find_artifact(store, "trainer_state", job.key)
    if checkpoint is not None and state is not None:
        return TrainResult(checkpoint.ref, state.ref, checkpoint.meta)
    make_deterministic(job.seed, job.threads)
    return train_sft(job, store, watchers) if isinstance(job, SftJob) else train_rl(job, store, watchers)
