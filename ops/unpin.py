"""Take back the pinned inputs of an iteration that has made nothing yet.

references (prompts, iteration_inputs) -> ledger -> empty rollout plans -> manifest of the inputs -> its files

Killed in between, the iteration is either still pinned, and the same call continues, or no longer pinned.
"""

from __future__ import annotations

from collections.abc import Iterator

from contracts.artifacts import Artifact, ArtifactRef, artifact_exists, discard_artifact, list_artifacts
from contracts.failpoints import failpoint
from contracts.store import Store
from inference.rollouts.groups import GROUP, group_key
from inference.rollouts.plan import RolloutPlan
from ops.graph import ITERATION_INPUTS, PER_ITERATION, PLAN, PROMPTS, ROLLOUTS
from ops.iteration_keys import iteration_key, next_iteration
from ops.ledger.index import discard
from ops.state import IterationState
from resources.errors import IterationRefused
from resources.experiment import Experiment
from resources.refs import has_ref, remove_ref

_REMOVED = (PROMPTS.name, ITERATION_INPUTS.name)


def unpin(store: Store, experiment: Experiment, iteration: str) -> ArtifactRef:
    """Remove the pinned inputs of an iteration; returns what was removed.

    The `prompts` artifact stays: its key does not contain the experiment, and others may use it. Raises
    IterationRefused if nothing is pinned, or if work beyond the prompts is committed, whose lineage would end nowhere.
    """
    pinned = ITERATION_INPUTS.work_on(IterationState(experiment, store, iteration), {}).find()
    where = f"{experiment.name}/{iteration}"
    if pinned is None:
        following = iteration_key(next_iteration(store, experiment.name))
        raise IterationRefused(f"{where} has no pinned inputs: nothing to take back; the next iteration is {following}")
    plans = list(_plans(store, pinned.ref))
    committed = [asset for asset in PER_ITERATION if asset not in _REMOVED]
    made = [asset for asset in committed if has_ref(store, experiment.name, asset, iteration)]
    made += [each for plan in plans for each in _work_of(store, plan) if each not in made]
    if made:
        raise IterationRefused(
            f"{where} can't be unpinned, since the lineage of its committed work would be lost ({', '.join(made)}):"
            f" materialize it to its decision, then use `triplane rollback -e {experiment.name}` if it went live"
        )
    for asset in _REMOVED:
        remove_ref(store, experiment.name, asset, iteration)
    failpoint("references-removed")
    discard(store)
    for each in (*plans, pinned):
        discard_artifact(store, each.ref)
    return pinned.ref


def _plans(store: Store, pinned: ArtifactRef) -> Iterator[Artifact]:
    """Rollout plans of the iteration."""
    for plan in list_artifacts(store, PLAN):
        parent = plan.manifest.parents.get(ITERATION_INPUTS.name)
        if parent is not None and parent.uri == pinned.uri:
            yield plan


def _work_of(store: Store, artifact: Artifact) -> Iterator[str]:
    """Committed rollouts and groups of a plan."""
    plan = RolloutPlan.model_validate(artifact.json("plan.json"))
    if artifact_exists(store, ROLLOUTS.writes, plan.key):
        yield ROLLOUTS.name
    groups = sum(artifact_exists(store, GROUP, group_key(plan, group)) for group in (*plan.groups, *plan.reserve))
    if groups:
        yield f"{groups} group{'s' * (groups > 1)}"
