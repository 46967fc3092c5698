"""The graph: all steps in order. Each step needs an asset in `assets/<name>.py`.

task_suite, base_policy                                                                  once
iteration_inputs -> prompts -> rollouts -> rewards -> dataset -> checkpoint -> evaluation -> sampler -> report
                                              \\-> reward_flips
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from contracts.artifacts import Artifact, ArtifactRef, Manifest, find_artifact, open_artifact
from contracts.digests import digest_of
from curation.dataset import DATASET_VERSION
from curation.rewards import REWARDS_VERSION
from curation.tasks.build import planned_key
from curation.tasks.importing.suite import IMPORT_SUITE_VERSION
from curation.tasks.suite import SUITE_VERSION, TaskSuiteConfig
from inference.rollouts import ROLLOUTS_VERSION
from ops import where
from ops.base_graph import BASE_POLICY, IMPORTED_BASE, MIXED_BASE
from ops.dataset_inputs import DatasetInputs
from ops.difficulty import difficulty_note
from ops.floor import find_floor
from ops.fork import source_inputs
from ops.readings import EVALUATION_RUN, EVALUATION_RUN_VERSION, WHO, readings_of, sampling_slice
from ops.spec import Refs, Slice, StepSpec
from ops.state import IterationInputs, IterationState
from resources.base_config import SftBase
from resources.experiment import Experiment, ForkConfig
from resources.refs import earlier_refs, read_ref
from trainer.config import RL_VERSION

PLAN = "rollout_plan"
"""Kind of the artifact that assigns an iteration's groups to shards; its key is that of the rollouts."""


def _place(state: IterationState) -> Slice:
    return {"experiment": state.experiment.name, "iteration": state.iteration}


TASK_SUITE = StepSpec(
    name="task_suite",
    version=SUITE_VERSION,
    slice=lambda state: state.experiment.tasks.made_from,
    plane="curation",
    needs=("sandboxes",),
    once=True,
)
IMPORTED_SUITE = replace(
    TASK_SUITE,
    version=IMPORT_SUITE_VERSION,
    key_of=lambda state: planned_key(state.experiment.tasks, state.store),
    recorded_by=None,
)


def _fork_of(experiment: Experiment) -> ForkConfig:
    assert experiment.fork is not None, "only a fork takes its suite and base policy from a source"
    return experiment.fork


def _of_source(spec: StepSpec, taken: Callable[[IterationInputs], ArtifactRef]) -> StepSpec:
    """Declaration of a step whose artifact a fork takes from its source."""
    return replace(
        spec,
        version="1",
        slice=lambda state: _fork_of(state.experiment).model_dump(mode="json", exclude={"replay"}),
        where=lambda experiment: f"taken from {_fork_of(experiment)}",
        key_inputs=None,
        key_of=lambda state: taken(source_inputs(state.store, _fork_of(state.experiment))).key,
        recorded_by=None,
        part_versions={},
        part_configs=None,
        part_slices=None,
    )


FORKED_SUITE = _of_source(TASK_SUITE, lambda source: source.task_suite)
FORKED_BASE = _of_source(BASE_POLICY, lambda source: source.started.checkpoint)

ITERATION_INPUTS = StepSpec(
    name="iteration_inputs",
    version="1",
    slice=_place,
    inputs={"task_suite": "task_suite", "base": "base_policy"},
    key_inputs=lambda state: {},  # the key depends on the partition alone, so the artifact is written once
    recorded_by=None,
)


def _range(state: IterationState) -> Slice:
    """Pass rates that tasks are drawn from; empty without such a range, so that keys stay as they are."""
    wanted = state.difficulty
    return {"tasks": {"difficulty": wanted.model_dump(mode="json", exclude={"artifact"})}} if wanted else {}


def _drawn_from(state: IterationState) -> Refs | None:
    """The suite, its difficulty if tasks are drawn by it, and what was carried over."""
    given = PROMPTS.parents(state)
    measured = state.pinned.difficulty if state.pinned and state.difficulty else None
    return given and {**given, **({"difficulty": measured} if measured else {}), **state.carried_over}


def _in_excess(state: IterationState) -> Slice:
    """Number of groups to draw beyond those needed; empty if none, so that keys stay as they are."""
    more = state.experiment.rollouts.carry_over
    return {"carry_over": more} if more else {}


def _sampled_from(state: IterationState) -> Refs | None:
    """Policy, prompts and suite, and what was carried over."""
    given = ROLLOUTS.parents(state)
    return given and {**given, **state.carried_over}


PROMPTS = StepSpec(
    name="prompts",
    version="1",
    slice=lambda state: {
        **state.experiment.prompts.model_dump(mode="json", exclude={"workers"}),
        "iteration": state.sampled_as["iteration"],
        "cursor": state.pinned.cursor if state.pinned else 0,
        "seed": state.experiment.seed,
        **_range(state),
        **_in_excess(state),
    },
    inputs={"task_suite": "iteration_inputs.task_suite"},
    key_inputs=_drawn_from,
    note=difficulty_note,
)

ROLLOUTS = StepSpec(
    name="rollouts",
    version=ROLLOUTS_VERSION,
    slice=lambda state: {
        **sampling_slice(state.experiment, state.experiment.engine),
        **state.sampled_as,
        "workers": state.experiment.prompts.workers,
        "rollouts": state.experiment.rollouts.model_dump(mode="json"),
    },
    inputs={
        "policy": "iteration_inputs.policy",
        "prompts": "prompts",
        "task_suite": "iteration_inputs.task_suite",
    },
    key_inputs=_sampled_from,
    plane="inference",
    needs=("sampler", "sandboxes"),
    recorded_by=PLAN,
)

REWARDS = StepSpec(
    name="rewards",
    version=REWARDS_VERSION,
    slice=lambda state: state.experiment.rewards.slice(),
    inputs={"rollouts": "rollouts", "task_suite": "iteration_inputs.task_suite"},
    plane="curation",
    needs=("sandboxes",),
)


def _compared_gradings(state: IterationState) -> Refs | None:
    """These rewards, the previous ones of the same rollouts, and the datasets and checkpoints made of those."""
    rewards, name, partition = state.find(REWARDS.name), state.experiment.name, state.iteration
    earlier = earlier_refs(state.store, name, REWARDS.name, partition, rewards) if rewards else []
    made = find_artifact(state.store, REWARDS.name, rewards.key) if rewards and earlier else None
    if rewards is None or made is None:
        return {"rewards": rewards} if rewards else None

    def made_of(asset: str, role: str, parents: Iterable[ArtifactRef]) -> dict[str, ArtifactRef]:
        now, allowed = read_ref(state.store, name, asset, partition), set(parents)
        refs = [now, *earlier_refs(state.store, name, asset, partition, now)] if now else []
        found = (find_artifact(state.store, ref.kind, ref.key) for ref in refs)
        of_them = (each.ref for each in found if each and each.manifest.parents.get(role) in allowed)
        return {f"{asset} {ref.short}": ref for ref in of_them}

    for ref in earlier:
        other = find_artifact(state.store, ref.kind, ref.key)
        if other is not None and other.manifest.parents["rollouts"] == made.manifest.parents["rollouts"]:
            datasets = made_of(DATASET.name, "rewards", [ref])
            checkpoints = made_of(CHECKPOINT.name, "dataset", datasets.values())
            return {"rewards": rewards, "previous": ref, **datasets, **checkpoints}
    return {"rewards": rewards}


REWARD_FLIPS = StepSpec(
    name="reward_flips",
    version="2",  # a changed verdict is a row, too
    slice=lambda state: {},
    inputs={"rewards": "rewards"},
    plane="curation",
    key_inputs=_compared_gradings,
)


def _dataset_inputs(state: IterationState) -> Refs | None:
    """Rollouts, rewards and what `DatasetInputs` adds."""
    given = DATASET.parents(state)
    return given and DatasetInputs(state.store, state.experiment.dataset, given).refs


DATASET = StepSpec(
    name="dataset",
    version=DATASET_VERSION,
    slice=lambda state: state.experiment.dataset.model_dump(mode="json"),
    inputs={"rollouts": "rollouts", "rewards": "rewards"},
    plane="curation",
    where=lambda experiment: "this process (DuckDB)",
    key_inputs=_dataset_inputs,
)


def _training_seed(state: IterationState) -> int:
    """Separate 31-bit training seed for each iteration; a repeated one has that of its source."""
    return int(digest_of([state.experiment.seed, f"training/{state.sampled_as['iteration']}"])[:8], 16) >> 1


CHECKPOINT = StepSpec(
    name="checkpoint",
    version=RL_VERSION,
    slice=lambda state: {
        "rl": state.experiment.trainer.rl.model_dump(mode="json"),
        "seed": _training_seed(state),
        "numerics": state.experiment.trainer.launcher.numerics,
    },
    inputs={
        "dataset": "dataset",
        "checkpoint": "iteration_inputs.start.checkpoint",
        "trainer_state": "iteration_inputs.start.trainer_state",
    },
    plane="trainer",
    needs=("launcher", "sampler"),
)


def _compared_runs(state: IterationState) -> Refs | None:
    """The runs of candidate and parent, and of the best policy so far on the gate, by role."""
    candidate, pinned = state.find("checkpoint"), state.pinned
    if candidate is None or pinned is None or pinned.start is None:
        return None
    found: dict[str, Artifact | None] = {
        f"{who}_{each.name}": each.work(state.store, state.experiment, policy, pinned.task_suite).find()
        for who, policy in zip(WHO, (candidate, pinned.start.checkpoint), strict=True)
        for each in readings_of(state.experiment)
    }
    runs = {role: run.ref for role, run in found.items() if run is not None}
    if len(runs) < len(found):
        return None
    floor = find_floor(state.store, state.experiment, pinned.start.checkpoint, pinned.base, pinned.task_suite)
    return runs | ({"best_gate": floor.run.ref} if floor else {})


def _run_slices(state: IterationState, made: Artifact) -> Iterator[tuple[Any, Any]]:
    wanted = {f"{who}_{each.name}": each for each in readings_of(state.experiment) for who in WHO}
    # ignores the best policy so far: an earlier evaluation may have run it, with other settings
    runs = {
        role: ref
        for role, ref in made.manifest.parents.items()
        if ref.kind == EVALUATION_RUN and role.startswith(tuple(f"{who}_" for who in WHO))
    }
    for role, ref in runs.items():
        now = wanted[role].slice(state.experiment) if role in wanted else {}
        yield open_artifact(state.store, ref).manifest.config, now
    yield sorted(runs), sorted(wanted)


EVALUATION = StepSpec(
    name="evaluation",
    version="2",
    slice=lambda state: {each.name: each.slice(state.experiment) for each in readings_of(state.experiment)},
    inputs={"candidate": "checkpoint", "parent": "iteration_inputs.start.checkpoint"},
    plane="inference",
    needs=("sampler", "sandboxes"),
    where=where.evaluation,
    config=lambda state: {"confidence": state.experiment.promotion.confidence},
    key_inputs=_compared_runs,
    part_versions={EVALUATION_RUN: EVALUATION_RUN_VERSION},
    part_slices=_run_slices,
)


def _gate_note(state: IterationState) -> str:
    from ops.gate_power import gate_note  # a simulation, for dry runs only

    return gate_note(state.store, state.experiment)


SAMPLER = StepSpec(
    name="sampler",
    version="3",  # unsound weights and tampering on the gate refuse a candidate
    slice=lambda state: {
        **state.experiment.promotion.model_dump(mode="json", exclude={"on_refusal"}),
        **_place(state),
    },
    inputs={
        "candidate": "checkpoint",
        "parent": "iteration_inputs.start.checkpoint",
        "evaluation": "evaluation",
    },
    plane="inference",
    needs=("sampler", "sandboxes"),
    where=where.deployment,
    note=_gate_note,
)

REPORTED = (ITERATION_INPUTS, PROMPTS, ROLLOUTS, REWARDS, DATASET, CHECKPOINT, EVALUATION, SAMPLER)
REPORT = StepSpec(
    name="report",
    version="2",
    slice=lambda state: {},
    inputs={spec.name: spec.name for spec in REPORTED},
    key_of=lambda state: None,  # the key contains rows of earlier iterations, which planning does not read
    recorded_by=None,
)

GRAPH = (TASK_SUITE, BASE_POLICY, *REPORTED, REWARD_FLIPS, REPORT)
"""The steps in order, with a generated suite and a trained base policy; see `graph_of`."""
ONCE = tuple(spec.name for spec in GRAPH if spec.once)
"""Unpartitioned assets."""
PER_ITERATION = tuple(spec.name for spec in GRAPH if not spec.once)
"""Assets with one partition an iteration."""
SAMPLED = (ITERATION_INPUTS.name, PROMPTS.name, ROLLOUTS.name, REWARDS.name, REWARD_FLIPS.name, DATASET.name)
"""Those that come before the training. With overlap, another iteration trains meanwhile."""
LEARNED = tuple(name for name in PER_ITERATION if name not in SAMPLED)
"""The training and what comes after it."""


def pool_of(experiment: Experiment, asset: str) -> str:
    """Pool of Dagster that an asset's runs occupy: the experiment's; with overlap, sampling has its own."""
    return f"{experiment.name}/sample" if experiment.off_policy.overlap and asset in SAMPLED else experiment.name


def graph_of(experiment: Experiment) -> tuple[StepSpec, ...]:
    """The steps of an experiment in order, with its suite and its base policy made, imported or taken from a source."""
    suite = TASK_SUITE if isinstance(experiment.tasks, TaskSuiteConfig) else IMPORTED_SUITE
    base = IMPORTED_BASE
    if isinstance(experiment.base, SftBase):
        base = BASE_POLICY if experiment.base.plain else MIXED_BASE
    if experiment.fork is not None:
        suite, base = FORKED_SUITE, FORKED_BASE
    return tuple({TASK_SUITE.name: suite, BASE_POLICY.name: base}.get(spec.name, spec) for spec in GRAPH)


def spec_behind(spec: StepSpec, made: Manifest) -> StepSpec:
    """Declaration that made this artifact of a step: suite and base policy may have been imported or, in a fork, the
    base policy may be any checkpoint.
    """
    if spec is TASK_SUITE and made.config.get("kind") == "import":
        return IMPORTED_SUITE
    if spec is BASE_POLICY and "demonstrations" not in made.parents:
        return CHECKPOINT if "dataset" in made.parents else IMPORTED_BASE
    if spec is BASE_POLICY and ("mixture" in made.config or "checkpoint" in made.parents):
        return MIXED_BASE
    return spec
