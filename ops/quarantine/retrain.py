"""The way back to a live policy that saw no quarantined episode.

    live policy tainted -> roll back to the last promotion before the first tainted one
                        -> make that iteration's dataset, checkpoint, evaluation, decision and report again

The plan is derived from the registry and the artifacts alone, so that the same command continues after a kill.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from contracts.artifacts import Artifact
from contracts.store import Store
from ops.graph import CHECKPOINT, DATASET, EVALUATION, REPORT, REWARDS, ROLLOUTS, SAMPLER
from ops.inputs import find_inputs
from ops.quarantine.members import QUARANTINED
from ops.rollback import RollbackPlan, plan_rollback
from ops.state import IterationState
from resources.errors import RegistryError
from resources.experiment import Experiment
from resources.refs import read_artifact, read_ref
from resources.registry import BASE, LivePolicy, Registry

MADE_AGAIN = tuple(spec.name for spec in (DATASET, CHECKPOINT, EVALUATION, SAMPLER, REPORT))
"""Assets of an iteration that is trained again."""
_CHAIN = ((CHECKPOINT, "dataset"), (EVALUATION, "candidate"), (SAMPLER, "evaluation"), (REPORT, "sampler"))
"""Step -> role of the artifact of the step before it in MADE_AGAIN."""


@dataclass(frozen=True)
class Retraining:
    """An iteration to train again on the datasets that are left."""

    iteration: str
    """First iteration whose promoted policy is tainted."""
    rollback: RollbackPlan | None
    """The way to its parent; None if that is live."""

    @property
    def superseded(self) -> tuple[str, ...]:
        """Later iterations whose results no longer count."""
        return tuple(each for each in (self.rollback.undone if self.rollback else ()) if each != self.iteration)


def plan_retraining(store: Store, experiment: Experiment, tainted: Container[str]) -> Retraining | None:
    """How to replace the tainted live policy; None if it is not tainted, and the first tainted iteration was trained
    again. tainted: URIs of checkpoints.

    Raises RegistryError if no policy that the iteration started from can be made live.
    """
    registry = Registry(store, experiment.name)
    live, history, standing = registry.live(), registry.history(), registry.standing()
    if live is None:
        return None
    first = next((number for number in standing if history[number - 1].policy.uri in tainted), None)
    if first is None:
        undone = next((each for each in history if _was_undone(each, live, tainted)), None)
        if undone is None or is_current(store, experiment, undone.iteration):
            return None
        return Retraining(undone.iteration, None)
    before = standing[standing.index(first) - 1] if first != standing[0] else 0
    iteration = history[first - 1].iteration
    inputs = find_inputs(store, experiment, iteration)
    if inputs is not None and inputs.base.uri in tainted:
        raise RegistryError(
            f"the base policy of {experiment.name} was trained on them (base.mixture), and so was every policy since:"
            " quarantine without --retrain, materialize base_policy, which then leaves accepted episodes out (remove"
            f" rows of files by hand), and run `triplane rollback -e {experiment.name} --to {BASE}`"
        )
    plan = plan_rollback(store, experiment.name, str(before) if before else BASE)
    begun = inputs.start if inputs else None
    if begun is None or begun.checkpoint.digest != plan.target.policy.digest:
        what = begun.checkpoint.short if begun else "inputs that are gone"
        raise RegistryError(
            f"iteration {iteration} of {experiment.name} started from {what}, which was never live, so a policy"
            " trained again from there can't go live: roll back with `triplane rollback"
            f" -e {experiment.name} --to {before or BASE}` and run further iterations"
        )
    return Retraining(iteration, plan)


def _was_undone(entry: LivePolicy, live: LivePolicy, tainted: Container[str]) -> bool:
    return entry.rollback is None and entry.policy.uri in tainted and entry.parent == live.policy.digest


def needs_rebuild(store: Store, experiment: Experiment, iteration: str) -> bool:
    """Whether the dataset of an iteration holds other quarantined episodes than the marks in force say."""
    made = read_artifact(store, experiment.name, DATASET.name, iteration)
    refs = {
        spec.name: ref
        for spec in (ROLLOUTS, REWARDS)
        if (ref := read_ref(store, experiment.name, spec.name, iteration)) is not None
    }
    work = DATASET.work(IterationState(experiment, store, iteration, refs))
    if made is None or work is None:  # will be made without them
        return False
    return made.manifest.parents.get(QUARANTINED) != work.parents.get(QUARANTINED)


def is_current(store: Store, experiment: Experiment, iteration: str) -> bool:
    """Whether an iteration's dataset respects the marks, and everything after it was made from it."""
    before: Artifact | None = read_artifact(store, experiment.name, DATASET.name, iteration)
    for spec, role in _CHAIN:
        made = read_artifact(store, experiment.name, spec.name, iteration)
        if before is None or made is None or made.manifest.parents.get(role) != before.ref:
            return False
        before = made
    return not needs_rebuild(store, experiment, iteration)
