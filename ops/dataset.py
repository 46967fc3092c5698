"""Select the sequences of an iteration that train."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contracts.artifacts import Artifact, open_artifact
from curation.dataset import build_dataset
from ops.dataset_inputs import DatasetInputs
from ops.step import Step
from resources.errors import NothingLeft
from resources.quarantine import Mark


def make_dataset(step: Step) -> Artifact:
    """Make the `dataset` artifact of an iteration.

    Raises NothingLeft if every episode is quarantined, RewardsMismatch if the rewards lack a component of a rule.
    """
    given = {role: step.parent(role) for role in step.spec.inputs}
    inputs = DatasetInputs(step.store, step.experiment.dataset, given)
    marks, work = inputs.marks, step.spec.work_on(step.state, inputs.refs)
    found = work.find()
    if found is not None:
        return found
    inputs.commit()
    rollouts, rewards = (open_artifact(step.store, given[role]) for role in ("rollouts", "rewards"))
    with work.writer() as out:
        report = build_dataset(rollouts, rewards, inputs.config, out, marks, inputs.ratings, inputs.families)
        if marks and len(marks) == report.episodes:
            raise NothingLeft(nothing_left(f"{step.experiment.name}/{step.iteration}", marks))
        return out.commit(meta=report.model_dump(mode="json"))


def nothing_left(where: str, marks: Mapping[str, Sequence[Mark]]) -> str:
    """Message for an iteration whose episodes are all quarantined. marks: by episode."""
    all_ = {mark.number: mark for each in marks.values() for mark in each}
    lifted = " and ".join(f"`triplane quarantine --lift {number}`" for number in sorted(all_))
    return (
        f"every episode of {where} is quarantined, by {', '.join(map(str, all_.values()))}: nothing is left to train"
        f" on; lift a mark with {lifted}, or go back to a policy that is not tainted with `triplane rollback`"
    )
