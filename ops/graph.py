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
from curation.errors import MixtureError
from curation.rewards import REWARDS_VERSION
from curation.tasks.build import planned_key
from curation.tasks.demonstrations import DEMONSTRATIONS_VERSION, demonstrations_key, demonstrations_slice
from curation.tasks.importing.suite import IMPORT_SUITE_VERSION
from curation.tasks.suite import SUITE_VERSION, TaskSuiteConfig
from curation.tokenizer import TOKENIZER_VERSION, tokenizer_key
from inference.rollouts import ROLLOUTS_VERSION
from ops import where
from ops.dataset_inputs import DatasetInputs
from ops.difficulty import difficulty_note
from ops.floor import find_floor
from ops.fork import source_inputs
from ops.mixture import VERSIONS as SOURCE_VERSIONS
from ops.mixture import Sources, shares_of, source_slice, sources_of
from ops.readings import EVALUATION_RUN, EVALUATION_RUN_VERSION, WHO, readings_of, sampling_slice
from ops.spec import Refs, Slice, StepSpec
from ops.state import IterationInputs, IterationState
from resources.errors import NotMaterialized
from resources.experiment import Experiment, ForkConfig, ImportedBase, SftBase
from resources.refs import earlier_refs, read_artifact, read_ref
from trainer.config import IMPORT_VERSION, RL_VERSION, SFT_VERSION
from trainer.precision import DEFAULT

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


def _sft(experiment: Experiment) -> SftBase:
    assert isinstance(experiment.base, SftBase), "an imported base policy is not trained here"
    return experiment.base


def _precision(experiment: Experiment) -> Slice:
    """The base policy's recipe; empty for the default, so that keys stay as they are without it."""
    chosen = experiment.trainer.precision
    return {} if chosen == DEFAULT else {"precision": chosen.model_dump(mode="json")}


def _warm_start_slice(state: IterationState) -> Slice:
    experiment, base = state.experiment, _sft(state.experiment)
    return {
        "model": base.model.model_dump(mode="json"),
        "sft": base.sft.model_dump(mode="json"),
        "seed": experiment.seed,
        "numerics": experiment.trainer.launcher.numerics,
        **_precision(experiment),
    }


def _taught_by(state: IterationState) -> Refs | None:
    """Tokenizer and demonstrations of the warm start."""
    base, seed = _sft(state.experiment), state.experiment.demonstrated.seed
    tokenizer = find_artifact(state.store, "tokenizer", tokenizer_key(seed))
    if tokenizer is None:
        return None
    shown = find_artifact(state.store, "demonstrations", demonstrations_key(base.demonstrations, seed, tokenizer.ref))
    return {"tokenizer": tokenizer.ref, "demonstrations": shown.ref} if shown else None


def _demonstration_config(experiment: Experiment) -> Slice:
    return {"demonstrations": demonstrations_slice(_sft(experiment).demonstrations, experiment.demonstrated.seed)}


def _demonstration_slices(state: IterationState, made: Artifact) -> Iterator[tuple[Any, Any]]:
    for kind, wanted in _demonstration_config(state.experiment).items():
        if kind in made.manifest.parents:
            yield open_artifact(state.store, made.manifest.parents[kind]).manifest.config, wanted


BASE_POLICY = StepSpec(
    name="base_policy",
    version=SFT_VERSION,
    slice=_warm_start_slice,
    kind="checkpoint",
    plane="trainer",
    needs=("launcher",),
    once=True,
    key_inputs=_taught_by,
    part_versions={"tokenizer": TOKENIZER_VERSION, "demonstrations": DEMONSTRATIONS_VERSION},
    part_configs=_demonstration_config,
    part_slices=_demonstration_slices,
)


def _mixed_slice(state: IterationState) -> Slice:
    """What the trainer records of a supervised base policy that is not plain."""
    base, plain = _sft(state.experiment), _warm_start_slice(state)
    found = {name: value for name, value in plain.items() if name != "model" or base.start is None}
    found |= {"lora": base.lora.model_dump(mode="json")} if base.lora else {}
    return found | ({"mixture": shares_of(base)} if base.mixture else {})


def _placed_slice(state: IterationState) -> Slice:
    """The same with places: of the imported model, files and iterations, whose content is in the key."""
    base = _sft(state.experiment)
    places = {"start": base.start.model_dump(mode="json")} if base.start else {}
    return _mixed_slice(state) | places | {"sources": [each.model_dump(mode="json") for each in base.mixture]}


def _mixed_from(state: IterationState) -> Refs | None:
    """Tokenizer, sources and, as the latest base policy records it, the imported model."""
    base, start = _sft(state.experiment), dict[str, ArtifactRef]()
    if base.start is None:
        tokenizer = find_artifact(state.store, "tokenizer", tokenizer_key(state.experiment.demonstrated.seed))
        used = tokenizer.ref if tokenizer else None
    else:
        made = read_artifact(state.store, state.experiment.name, BASE_POLICY.name)
        parents = made.manifest.parents if made else {}
        start = {role: parents[role] for role in ("checkpoint", "trainer_state") if role in parents}
        used = parents.get("tokenizer") if start else None
    if used is None:
        return None
    sources = Sources(state.store, state.experiment, base, used)
    try:
        found = {role: sources.find(source) for role, source in sources_of(base).items()}
    except (NotMaterialized, MixtureError):
        return None
    refs = {role: each.ref for role, each in found.items() if each is not None}
    return {"tokenizer": used, **refs, **start} if len(refs) == len(found) else None


def _require_inputs(state: IterationState) -> None:
    """Raise in a dry run what the run would, for a file or an iteration that is missing."""
    base, nothing = _sft(state.experiment), ArtifactRef(kind="tokenizer", key="0" * 64, digest="0" * 64)
    for source in sources_of(base).values():
        Sources(state.store, state.experiment, base, nothing).require_inputs(source)


def _source_slices(state: IterationState, made: Artifact) -> Iterator[tuple[Any, Any]]:
    base = _sft(state.experiment)
    for role, source in sources_of(base).items():
        if role in made.manifest.parents:
            recorded = open_artifact(state.store, made.manifest.parents[role]).manifest.config
            yield recorded, source_slice(state.experiment, base, source)


MIXED_BASE = replace(
    BASE_POLICY,
    slice=_placed_slice,
    config=_mixed_slice,
    key_inputs=_mixed_from,
    part_versions={"demonstrations": DEMONSTRATIONS_VERSION, **SOURCE_VERSIONS},
    part_configs=lambda experiment: {
        role: source_slice(experiment, _sft(experiment), source)
        for role, source in sources_of(_sft(experiment)).items()
    },
    part_slices=_source_slices,
    note=_require_inputs,
)


def _imported_key(state: IterationState) -> str | None:
    """Key of the latest import, which depends on the imported content."""
    ref = read_ref(state.store, state.experiment.name, "base_policy")
    return ref.key if ref else None


def _import_place(experiment: Experiment) -> str:
    assert isinstance(experiment.base, ImportedBase), "a trained base policy is not imported"
    return f"import of {experiment.base.path}"


IMPORTED_BASE = replace(
    BASE_POLICY,
    version=IMPORT_VERSION,
    slice=lambda state: {**state.experiment.base.model_dump(mode="json"), **_precision(state.experiment)},
    where=_import_place,
    key_inputs=None,
    key_of=_imported_key,
    recorded_by=None,
    part_versions={},
    part_configs=None,
    part_slices=None,
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
