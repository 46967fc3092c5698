"""The tiny experiment's gate: a policy that solves its tasks goes live, its broken copy is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

import dagster as dg
import pyarrow as pa
import pytest
from dagster_world import World
from deployment_world import NoProgress, Stage, copied, doubled_scales, planted_checkpoint, spoilt, stage_of

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter, list_artifacts, open_artifact
from contracts.chat import ChatTokenizer
from contracts.digests import digest_of
from contracts.store import LocalStore, Store
from contracts.tasks import Split
from curation.tasks.bugs import Bug, draw_bugs
from curation.tasks.demonstrations import DEMONSTRATIONS, DEMONSTRATIONS_VERSION
from curation.tasks.expert import expert_episode, expert_tokens
from curation.tasks.suite import TaskSuiteConfig
from ops.deploy_decision import Decision, decide_deployment, gate_comparisons, read_decision
from ops.evaluation import evaluate
from ops.graph import EVALUATION, SAMPLER
from ops.health import gate_checks
from ops.inputs import trainer_state_of
from ops.smoke import play_smoke
from ops.spec import StepSpec
from ops.state import IterationState
from ops.step import Step
from resources.base_config import SftBase
from resources.experiment import Experiment
from resources.progress import no_progress
from resources.refs import require_ref, write_ref
from resources.sampler import SamplerResource
from resources.sandboxes import SandboxesResource
from trainer.config import SftConfig, SftJob
from trainer.sft import train_sft

BROKEN = "model.norm.weight"
"""Of zeros, it gives every token the same probability: the policy is served, and solves nothing."""


def gate_bugs(config: TaskSuiteConfig) -> list[Bug]:
    """The bugs behind the gate's tasks, drawn as `generate_tasks` does."""
    seen: set[str] = set()
    for split, count in ((Split.TRAIN, config.train), (Split.GATE, config.gate)):
        bugs = draw_bugs(count, split, config.seed, Random(f"tasks/{config.seed}/{split.value}"), seen)
    return bugs


def expert_policy(store: Store, experiment: Experiment) -> ArtifactRef:
    """A checkpoint that has learned the expert's episodes on the gate's own tasks by heart."""
    assert isinstance(experiment.base, SftBase) and isinstance(experiment.tasks, TaskSuiteConfig)
    (source,) = list_artifacts(store, "tokenizer")
    tokenizer = ChatTokenizer.from_directory(source.directory())
    bugs = gate_bugs(experiment.tasks)
    episodes = [expert_tokens(expert_episode(bug, bug.right), tokenizer) for bug in bugs]
    columns = [[ids for ids, _ in episodes], [roles for _, roles in episodes], [True] * len(bugs)]
    columns += [[bug.family for bug in bugs], [bug.task_id for bug in bugs]]
    rows = pa.Table.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, DEMONSTRATIONS, strict=True)],
        schema=DEMONSTRATIONS,
    )
    key = digest_of(["by heart"])
    with ArtifactWriter(
        store, "demonstrations", key, parents={"tokenizer": source.ref}, config={}, code_version=DEMONSTRATIONS_VERSION
    ) as out:
        for name in ("train.parquet", "validation.parquet"):
            out.add_table(name, rows)
        demonstrations = out.commit()
    job = SftJob(
        store=store.url,
        key=key,
        seed=1,
        tokenizer=source.ref,
        demonstrations=demonstrations.ref,
        model=experiment.base.model.model_copy(update={"layers": 2}),
        config=SftConfig(max_steps=600, warmup_steps=5, evaluate_every=20, expected_solve=0.98, expected_form=0.98),
    )
    result = train_sft(job, store)
    assert result is not None
    return result.checkpoint


@pytest.fixture(scope="module")
def stage(ran: World, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    """The tiny experiment under another name, in a copy of its store. Episodes are long enough for the expert's."""
    folder = tmp_path_factory.mktemp("gate") / "store"
    shutil.copytree(Path(ran.store.url), folder)
    rollouts = ran.experiment.rollouts.model_copy(update={"max_turns": 7, "max_tokens": 320, "max_turn_tokens": 64})
    world = World(ran.experiment, LocalStore(folder), ran.instance, ran.made)
    return stage_of(world, "gate", rollouts=rollouts)


@pytest.fixture(scope="module")
def handles() -> Iterator[tuple[SamplerResource, SandboxesResource]]:
    sampler, sandboxes = SamplerResource(), SandboxesResource()
    yield sampler, sandboxes
    sampler.close()
    sandboxes.close()


def judge(
    stage: Stage,
    handles: tuple[SamplerResource, SandboxesResource],
    candidate: ArtifactRef,
    parent: ArtifactRef,
    iteration: str,
) -> Decision:
    """Evaluate a candidate and decide about it, as the steps of an iteration do."""
    pinned, made = stage.inputs(iteration, parent), {"checkpoint": candidate}

    def step(spec: StepSpec) -> Step:
        context = dg.build_op_context()
        progress = NoProgress(context, stage.experiment.name, spec.name, iteration, no_progress)
        state = IterationState(stage.experiment, stage.world.store, iteration, dict(made), pinned)
        return Step(spec, state, progress, context)

    made["evaluation"] = evaluate(step(EVALUATION), *handles).ref
    decided = step(SAMPLER)
    smoke = play_smoke(decided, *handles, candidate, pinned.task_suite)
    return read_decision(decide_deployment(decided, lambda: smoke))


def evaluation_of(stage: Stage, candidate: ArtifactRef) -> Artifact:
    found = list_artifacts(stage.world.store, EVALUATION.name)
    return next(each for each in found if each.manifest.parents["candidate"].digest == candidate.digest)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_candidate_that_solves_goes_live_and_its_broken_copy_is_refused(
    stage: Stage, handles: tuple[SamplerResource, SandboxesResource]
) -> None:
    expert = expert_policy(stage.world.store, stage.experiment)
    broken = spoilt(stage.world, expert, BROKEN, 0.0)  # a base policy whose scales are near those of the expert
    state = open_artifact(stage.world.store, trainer_state_of(stage.world.store, expert))
    copied(stage.world.store, state, key=broken.key)
    write_ref(stage.world.store, stage.experiment.name, "base_policy", None, broken)
    good = judge(stage, handles, expert, broken, "0000")
    assert good.decision == "live", good.reasons
    assert "candidate is non-inferior to its parent: +1.000" in good.reasons[0]
    bad = judge(stage, handles, broken, expert, "0001")
    assert bad.decision == "refused"
    shown = gate_checks(gate_comparisons(evaluation_of(stage, broken), expert, stage.experiment.promotion.margin))
    assert [each.passed for each in shown] == [False, False] and shown[0].description in bad.reasons[0]
    best = str(shown[1].description)
    assert best == f"its parent is the best policy so far on the gate; {shown[0].description}", "red, with its reason"
    assert "candidate is not shown to be non-inferior to its parent: -" in bad.reasons[0]
    doubled = judge(stage, handles, planted_checkpoint(stage.world, expert, doubled_scales).ref, expert, "0002")
    assert doubled.decision == "refused", doubled.reasons
    live = stage.registry.live()
    assert live is not None and live.policy.digest == expert.digest


def test_trained_iterations_earn_rewards_that_differ(ran: World) -> None:
    for iteration in ran.made:
        rewards = open_artifact(ran.store, require_ref(ran.store, ran.experiment.name, "rewards", iteration))
        values = rewards.table("rewards.parquet")["reward"].to_pylist()
        assert max(values) > 0 and len(set(values)) > 1
