"""Remove what a finished job left in the store. Importing this needs no torch."""

from __future__ import annotations

from contracts.artifacts import discard_artifact, list_artifacts
from contracts.store import Store
from trainer.config import SNAPSHOT, SNAPSHOT_JOB


def drop_snapshots(store: Store, job_key: str) -> None:
    """Remove snapshots of a job that was killed after it committed its result. job_key: the job's key."""
    for snapshot in list(list_artifacts(store, SNAPSHOT)):
        if snapshot.manifest.config.get(SNAPSHOT_JOB) == job_key:
            discard_artifact(store, snapshot.ref)
