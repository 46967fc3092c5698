"""Select the sequences of an iteration that train."""

from __future__ import annotations

from typing import Any

from contracts.artifacts import Artifact, open_artifact
from curation.dataset import build_dataset
from ops.step import Step


def make_dataset(step: Step) -> Artifact:
    """Make the `dataset` artifact of an iteration."""
    found = step.work.find()
    if found is not None:
        return found
    rollouts, rewards = (open_artifact(step.store, step.parent(role)) for role in ("rollouts", "rewards"))
    with step.work.writer() as out:
        report = build_dataset(rollouts, rewards, step.experiment.dataset, out)
        meta: dict[str, Any] = report.model_dump(mode="json")
        return out.commit(meta=meta)
