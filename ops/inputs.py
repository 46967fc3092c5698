"""Inputs of an iteration, resolved once and pinned. They connect iteration i with i-1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from contracts.artifacts import (
    Artifact,
    ArtifactRef,
    ArtifactWriter,
    Frozen,
    find_artifact,
    list_artifacts,
    open_artifact,
)
from contracts.store import Store
from inference.rollouts.carry_over import UNFINISHED, carried_groups
from inference.rollouts.plan import GroupPlan, draw_prompts
from ops.difficulty import pinned_difficulty, training_tasks
from ops.graph import ITERATION_INPUTS, PROMPTS, ROLLOUTS
from ops.iteration_keys import iteration_key, next_iteration, require_key
from ops.loading import load_tasks
from ops.off_policy import require_recent
from ops.readings import require_splits
from ops.replay import lineage_of, replay
from ops.state import TRAINING_START, IterationInputs, IterationState, Start, read_inputs, training_start_key
from ops.step import Step
from resources.errors import IterationRefused, NotMaterialized, RegistryError
from resources.experiment import Experiment
from resources.refs import has_ref, read_artifact, read_ref
from resources.registry import Registry
from resources.training_launcher import require_launchable
from trainer.continuing import require_continuable
from trainer.errors import TrainingConfigError


class PromptsDrawn(Frozen):
    """Tasks that one iteration samples."""

    groups: list[GroupPlan]
    reserve: list[GroupPlan]
    cursor_after: int


def trainer_state_of(store: Store, checkpoint: ArtifactRef) -> ArtifactRef:
    """The trainer state that belongs to a checkpoint: it has the same action key. Raises NotMaterialized."""
    state = find_artifact(store, "trainer_state", checkpoint.key)
    if state is None:
        raise NotMaterialized(
            f"checkpoint {checkpoint.short} has no trainer_state in {store.url}: train or import it again"
        )
    return state.ref


def find_inputs(store: Store, experiment: Experiment, iteration: str) -> IterationInputs | None:
    """Pinned inputs of an iteration, or None if it has not begun."""
    work = ITERATION_INPUTS.work_on(IterationState(experiment, store, iteration), {})
    artifact = work.find()
    return read_inputs(store, artifact.ref) if artifact else None


def pin_inputs(step: Step, policy: str) -> Artifact:
    """Inputs of this iteration; pins them if it has not begun. policy: "live", "base" or a digest prefix of a
    checkpoint.

    Without a decision of the previous iteration, this one is sampled ahead: the start of its training stays open.
    Raises, and writes nothing, IterationRefused without a key and for one that is not an iteration's or too far ahead,
    and TaskError for a suite that lacks tasks.
    """
    if step.state.partition is None:
        following = iteration_key(next_iteration(step.store, step.experiment.name))
        raise IterationRefused(
            f"{step.experiment.name}/{step.spec.name} was launched without a partition: choose an iteration, the next"
            f" one is {following}"
        )
    require_key(step.store, step.experiment, step.iteration)
    found = step.work.find()
    if found is not None:
        return found
    if has_ref(step.store, step.experiment.name, ITERATION_INPUTS.name, step.iteration):
        raise IterationRefused(
            f"the pinned inputs of {step.experiment.name}/{step.iteration} are gone from {step.store.url}, and others"
            " would not fit its rollouts: restore the folder from a backup, or run another iteration"
        )
    require_launchable(step.experiment)  # fail now, not after hours of rollouts
    ahead = next_iteration(step.store, step.experiment.name) < int(step.iteration)
    # read after the decisions, each of which follows its promotion
    start = resolve_start(step.store, step.experiment.name, step.parent("base"), policy)
    inputs = IterationInputs(
        experiment=step.experiment.name,
        iteration=step.iteration,
        policy=start.checkpoint,
        start=None if ahead else start,
        task_suite=step.parent("task_suite"),
        base=step.parent("base"),
        cursor=cursor_before(step.store, step.experiment, step.iteration),
        carried_over=unfinished_before(step.store, step.experiment, step.iteration),
    )
    inputs = replay(step.store, step.experiment, inputs)
    require_splits(step.store, step.experiment, inputs.task_suite)
    _require_continuable(step, inputs.start.checkpoint if inputs.start else inputs.policy)
    inputs = inputs.model_copy(update={"difficulty": pinned_difficulty(step.store, step.experiment, inputs)})
    source, forked = lineage_of(step.store, step.experiment, inputs)
    begun = {} if ahead else {"trainer_state": start.trainer_state}
    measured = {"difficulty": inputs.difficulty} if inputs.difficulty else {}
    with step.work.writer({"policy": inputs.policy, **begun, **source, **measured, **inputs.carried}) as out:
        out.add_json("inputs.json", inputs.model_dump(mode="json"))
        restored = restoring_rollback(step.store, step.experiment.name, inputs.policy)
        return out.commit(
            meta={**step.work.config, "policy": inputs.policy.digest, "asked_for": policy, **restored, **forked}
        )


def _require_continuable(step: Step, start: ArtifactRef) -> None:
    try:
        require_continuable(open_artifact(step.store, start), step.experiment.trainer)
    except TrainingConfigError as error:
        raise IterationRefused(f"{step.experiment.name}/{step.iteration} can't be trained: {error}") from None


def with_start(step: Step) -> Step:
    """The step with the start of its training, which is pinned now if its iteration was sampled ahead: the live policy.

    Raises IterationRefused before the previous iteration is decided, or if the acting policy is too old by now.
    """
    if step.inputs.start is not None:
        return step
    before = iteration_key(next_iteration(step.store, step.experiment.name))
    if before != step.iteration:
        raise IterationRefused(
            f"{step.experiment.name}/{step.iteration} was sampled ahead, and {before} has no decision yet, after which"
            f" its training starts: materialize {before} first"
        )
    start = resolve_start(step.store, step.experiment.name, step.inputs.base, "live")
    limit = step.experiment.off_policy.max_staleness
    require_recent(step.store, f"{step.experiment.name}/{step.iteration}", step.inputs.policy, start.checkpoint, limit)
    pinned = step.state.made["iteration_inputs"]
    parents = {"iteration_inputs": pinned, "checkpoint": start.checkpoint, "trainer_state": start.trainer_state}
    config = {"experiment": step.experiment.name, "iteration": step.iteration}
    with ArtifactWriter(
        step.store, TRAINING_START, training_start_key(pinned), parents=parents, config=config, code_version="1"
    ) as out:
        out.add_json("start.json", start.model_dump(mode="json"))
        out.commit()
    return replace(step, state=replace(step.state, pinned=read_inputs(step.store, pinned)))


def restoring_rollback(store: Store, experiment: str, policy: ArtifactRef) -> dict[str, Any]:
    """Rollback that made this policy live, as {"rollback": {number, to, reason}}; empty if there was none."""
    live = Registry(store, experiment).live()
    if live is None or live.rollback is None or live.policy != policy:
        return {}
    return {"rollback": {"number": live.number, "to": live.rollback.to, "reason": live.rollback.reason}}


def resolve_start(store: Store, experiment: str, base: ArtifactRef, policy: str) -> Start:
    """Starting point for the requested policy. Raises RegistryError for an unknown or ambiguous digest prefix."""
    if policy == "live":
        live = Registry(store, experiment).live()
        if live is not None:
            return Start(checkpoint=live.policy, trainer_state=live.trainer_state)
        policy = "base"
    checkpoint = base if policy == "base" else find_checkpoint(store, policy)
    return Start(checkpoint=checkpoint, trainer_state=trainer_state_of(store, checkpoint))


def find_checkpoint(store: Store, prefix: str) -> ArtifactRef:
    """The one checkpoint whose content digest begins with `prefix`. Raises RegistryError."""
    found = {
        each.ref.digest: each.ref for each in list_artifacts(store, "checkpoint") if each.ref.digest.startswith(prefix)
    }
    if len(found) != 1:
        fault = "matches no checkpoint" if not found else f"matches {len(found)} checkpoints"
        raise RegistryError(f"policy {prefix!r} {fault} in {store.url}: give live, base or more digits of a digest")
    return next(iter(found.values()))


def cursor_before(store: Store, experiment: Experiment, iteration: str) -> int:
    """Number of prompts drawn before this iteration, as recorded by the previous one, whose draw is repeated if it
    committed none.
    """
    if int(iteration) == 0:
        return 0
    before = iteration_key(int(iteration) - 1)
    prompts = read_artifact(store, experiment.name, "prompts", before)
    if prompts is not None:
        return PromptsDrawn.model_validate(prompts.json("prompts.json")).cursor_after
    inputs = find_inputs(store, experiment, before)
    return draw(store, experiment, inputs).cursor_after if inputs else 0


def unfinished_before(store: Store, experiment: Experiment, iteration: str) -> list[ArtifactRef]:
    """What the iteration before left unfinished; empty if nothing, or if another policy must not continue it."""
    if int(iteration) == 0 or experiment.rollouts.profile == "deterministic":
        return []
    rollouts = read_ref(store, experiment.name, ROLLOUTS.name, iteration_key(int(iteration) - 1))
    found = find_artifact(store, UNFINISHED, rollouts.key) if rollouts else None
    return [found.ref] if found else []


def draw(store: Store, experiment: Experiment, inputs: IterationInputs) -> PromptsDrawn:
    """Draw the tasks that an iteration samples, after the groups that were carried over to it. Deterministic."""
    tasks = training_tasks(IterationState(experiment, store, inputs.iteration, pinned=inputs))
    carried: list[GroupPlan] = []
    for ref in inputs.carried_over:
        digests = {task.task_id: task.digest for task in load_tasks(store, inputs.task_suite).values()}
        carried = carried_groups(open_artifact(store, ref), digests)
    groups, reserve, after = draw_prompts(
        [task.task_id for task in tasks],
        count=experiment.prompts.groups + experiment.rollouts.carry_over,
        reserve=experiment.prompts.reserve,
        cursor=inputs.cursor,
        seed=experiment.seed,
        iteration=inputs.iteration,
        carried=carried,
    )
    return PromptsDrawn(groups=groups, reserve=reserve, cursor_after=after)


def draw_and_commit(step: Step) -> Artifact:
    """Make the `prompts` artifact of this iteration, or open that of a fork's source."""
    replayed = step.state.replayed(PROMPTS.name)
    found = open_artifact(step.store, replayed) if replayed else step.work.find()
    if found is not None:
        return found
    drawn = draw(step.store, step.experiment, step.inputs)
    selected = {"tasks_in_range": len(training_tasks(step.state))} if step.state.difficulty else {}
    with step.work.writer() as out:
        out.add_json("prompts.json", drawn.model_dump(mode="json"))
        counts = {"groups": len(drawn.groups), "reserve": len(drawn.reserve), "cursor_after": drawn.cursor_after}
        carried = sum(group.carried is not None for group in drawn.groups)
        return out.commit(meta={**counts, **selected, **({"carried_over": carried} if carried else {})})
