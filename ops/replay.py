"""Iterations of a fork that train on what an iteration of its source sampled.

    source: iteration_inputs, prompts, rollouts --by reference--> inputs of the fork's iteration

Nothing is drawn, sampled or copied: refused unless the fork's settings are those that the source sampled with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from contracts.artifacts import ArtifactRef, find_artifact, open_artifact
from contracts.store import Store
from ops.fork import source_inputs, source_key
from ops.graph import PLAN, PROMPTS, ROLLOUTS
from ops.iteration_keys import iteration_key
from ops.off_policy import require_recent
from ops.spec import Slice
from ops.state import IterationInputs, IterationState, Replayed
from resources.errors import IterationRefused
from resources.experiment import Experiment, ForkConfig
from resources.refs import require_ref

_FIELDS = {
    "engine": "engine.kind",
    "workers": "prompts.workers",
    "spaced": "base.spaced",
    "sandbox_limits": "sandboxes.limits",
}
"""Fields of an experiment, by their names in the slice of the rollouts, if these differ."""


def replay(store: Store, experiment: Experiment, inputs: IterationInputs) -> IterationInputs:
    """These inputs of an iteration, with the source's episodes if a fork repeats one of its source's iterations.

    Raises NotMaterialized or ArtifactMissing without the source's rollouts, IterationRefused if other settings sampled
    them or their policy is too far from the weights that training starts from.
    """
    fork, number = experiment.fork, int(inputs.iteration)
    if fork is None or number >= fork.replay:
        return inputs
    source = source_inputs(store, fork, number)
    found = inputs.model_copy(
        update={
            "policy": source.policy,
            "task_suite": source.task_suite,
            "cursor": source.cursor,
            "difficulty": source.difficulty,
            "carried_over": source.carried_over,
            "replayed": _replayed(store, fork, number, source),
        }
    )
    _require_same_sampling(IterationState(experiment, store, inputs.iteration, pinned=found), fork)
    if found.start is not None:  # else checked when the training begins
        start, most = found.start.checkpoint, experiment.off_policy.max_staleness
        require_recent(store, experiment.name, found.policy, start, most)
    return found


def preview(store: Store, experiment: Experiment, number: int = 0) -> IterationInputs | None:
    """Inputs that an iteration of a fork is pinned with while no policy of the fork is live; None if it samples.

    Raises like `replay`.
    """
    fork = experiment.fork
    if fork is None or number >= fork.replay:
        return None
    first, own = source_inputs(store, fork), {"experiment": experiment.name, "iteration": iteration_key(number)}
    own_start = first.model_copy(update={**own, "base": first.started.checkpoint, "replayed": None})
    return replay(store, experiment, own_start)


def lineage_of(store: Store, experiment: Experiment, inputs: IterationInputs) -> tuple[dict[str, ArtifactRef], Slice]:
    """Further parents and facts in the manifest of the inputs of an iteration that repeats one of its source."""
    replayed, fork = inputs.replayed, experiment.fork
    if replayed is None or fork is None:
        return {}, {}
    key = source_key(fork, int(inputs.iteration))
    source = require_ref(store, fork.experiment, "iteration_inputs", key)
    parents = {"source": source, "prompts": replayed.prompts, "rollouts": replayed.rollouts}
    return parents, {"forked_from": f"{fork.experiment}/{key}", "sampled_by": str(replayed)}


def _replayed(store: Store, fork: ForkConfig, number: int, source: IterationInputs) -> Replayed:
    """What to take from an iteration of the source. Raises NotMaterialized or ArtifactMissing."""
    key = source_key(fork, number)
    prompts, rollouts = (require_ref(store, fork.experiment, each, key) for each in (PROMPTS.name, ROLLOUTS.name))
    for ref in (prompts, rollouts):
        open_artifact(store, ref)
    place = source.replayed or Replayed(experiment=fork.experiment, iteration=key, prompts=prompts, rollouts=rollouts)
    return place.model_copy(update={"prompts": prompts, "rollouts": rollouts})


def _require_same_sampling(state: IterationState, fork: ForkConfig) -> None:
    """Raise IterationRefused if the experiment would draw or sample otherwise than its source has."""
    for spec, kind, prefix in ((PROMPTS, PROMPTS.writes, "prompts."), (ROLLOUTS, PLAN, "")):
        ref = state.replayed(spec.name)
        made = find_artifact(state.store, kind, ref.key) if ref else None
        for path, sampled, now in differences(made.manifest.config if made else {}, spec.own_config(state)):
            field = field_of(path if path.partition(".")[0] in Experiment.model_fields else prefix + path)
            raise IterationRefused(
                f"{field} is {now!r} in {state.experiment.name}, but {fork} was sampled with {sampled!r}: a fork keeps"
                f" the episodes; set {field} to {sampled!r}, or start an experiment of its own"
            )


def field_of(path: str) -> str:
    """Field of an experiment, such as sandboxes.limits.cpus, from its path in the slice of the rollouts."""
    root, dot, rest = path.partition(".")
    return f"{_FIELDS.get(root, root)}{dot}{rest}"


def differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(path, recorded value, value now) of the recorded values that differ."""
    for name, value in recorded.items():
        other = now.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            yield from ((f"{name}.{path}", *values) for path, *values in differences(value, other))
        elif value != other:
            yield name, value, other
