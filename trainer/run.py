"""Run a job of either kind, or return the result that already exists."""

from __future__ import annotations

from collections.abc import Iterable

from contracts.artifacts import find_artifact
from contracts.store import open_store
from trainer.config import RlJob, SftJob
from trainer.devices import open_device
from trainer.leftovers import drop_snapshots
from trainer.metrics import Watcher
from trainer.plan.check import check_memory
from trainer.ranks import join_ranks
from trainer.result import TrainResult
from trainer.rl import train_rl
from trainer.runtime import make_deterministic
from trainer.sft import train_sft


def find_result(job: SftJob | RlJob) -> TrainResult | None:
    """Result of the job if its artifacts are committed."""
    store = open_store(job.store)
    checkpoint = find_artifact(store, "checkpoint", job.key)
    state = find_artifact(store, "trainer_state", job.key)
    if checkpoint is None or state is None:
        return None
    return TrainResult(checkpoint.ref, state.ref, checkpoint.meta)


def run_job(job: SftJob | RlJob, watchers: Iterable[Watcher] = ()) -> TrainResult | None:
    """Result of the job; committed artifacts are reused. None on ranks other than 0. Raises TriplaneError."""
    group, device = job.backend != "torch", open_device(job.device)
    with join_ranks(job.ranks, job.rank_timeout_s, group=group, device=device) as ranks:
        # the ranks decide together, since another launch may commit the result between two looks
        store = open_store(job.store)
        if any(ranks.total(find_result(job) is not None)):
            if not ranks.leads:
                return None
            drop_snapshots(store, job.key)
            return find_result(job)
        make_deterministic(job.seed, job.threads, device)
        check_memory(job, store)
        if isinstance(job, SftJob):
            return train_sft(job, store, watchers, ranks)
        return train_rl(job, store, watchers, ranks)
