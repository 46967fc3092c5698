"""Fan-out of rollouts: plan -> map(shard) -> merge, as Dagster ops with one map.

The plan is committed before anything is sampled; merge raises unless every group it leads to is committed. So a shard
that silently did not run is an error, and a re-run repeats only what is missing.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import dagster as dg

from contracts.artifacts import Artifact, ArtifactRef, artifact_exists, open_artifact
from contracts.errors import ArtifactMissing
from contracts.store import Store
from curation.verify import Verifier
from inference.rollouts.merge import Gathered, gather_groups, merge_groups
from inference.rollouts.order import seconds_of
from inference.rollouts.plan import GroupPlan, RolloutPlan
from inference.rollouts.progress import ShardProgress
from inference.rollouts.worker import run_shard
from ops.graph import PLAN, ROLLOUTS, pool_of
from ops.health import checked, infrastructure_held
from ops.inputs import PromptsDrawn
from ops.loading import load_tasks, load_tokenizer, vocabulary_of
from ops.pod_tags import pod_tags
from ops.replay import differences, field_of
from ops.results import output, table_facts
from ops.retries import bounded, step_retries
from ops.rollout_numbers import rollout_numbers, sampled_numbers, speed_before
from ops.samples import sample_episodes
from ops.step import Step, begin
from resources.errors import IterationRefused
from resources.experiment import Experiment
from resources.loops import run_async
from resources.progress import ProgressSink
from resources.ref_io import REF
from resources.refs import partitions, read_artifact
from resources.sampler import SamplerResource
from resources.sandboxes import SandboxesResource
from resources.store import StoreResource

CHECK = "every_group_committed"
LOOKED_BACK = 3
"""Iterations whose telemetry tells how long a task's episodes take."""


def make_plan(step: Step) -> Artifact:
    """Make the `rollout_plan` artifact, which holds everything that a worker needs and has the key of the rollouts.

    In an iteration of a fork that repeats one of its source, the source's rollouts, which hold their plan.
    """
    replayed = step.state.replayed(ROLLOUTS.name)
    if replayed:
        return open_artifact(step.store, replayed)
    pinned = {"iteration_inputs": step.state.made["iteration_inputs"]}
    work = replace(step.work, kind=PLAN)
    found = work.find()
    if found is not None:
        return found
    drawn = PromptsDrawn.model_validate(open_artifact(step.store, step.parent("prompts")).json("prompts.json"))
    plan = RolloutPlan(
        experiment=step.experiment.name,
        iteration=step.iteration,
        seed=step.experiment.seed,
        key=work.key,
        policy=step.parent("policy"),
        groups=drawn.groups,
        reserve=drawn.reserve,
        workers=step.experiment.prompts.workers,
        config=step.experiment.rollouts,
        needed=step.experiment.prompts.groups if step.experiment.rollouts.carry_over else None,
        inputs={**{role: ref for role, ref in work.parents.items() if role != "policy"}, **pinned},
    )
    with work.writer(pinned) as out:
        out.add_json("plan.json", plan.model_dump(mode="json"))
        return out.commit(meta={"groups": len(plan.groups), "reserve": len(plan.reserve), "workers": plan.workers})


def read_plan(artifact: Artifact) -> RolloutPlan:
    """Content of a `rollout_plan` artifact."""
    return RolloutPlan.model_validate(artifact.json("plan.json"))


async def sample_shard(
    step: Step, plan: RolloutPlan, shard: int, sampler: SamplerResource, sandboxes: SandboxesResource
) -> dict[str, Any]:
    """Sample and commit the missing groups of one shard.

    Returns its counts, and when it began and ended in Unix seconds.
    """
    experiment = step.experiment
    tasks = load_tasks(step.store, plan.inputs["task_suite"])
    policy = open_artifact(step.store, plan.policy)
    async with (
        sandboxes.client(experiment.sandboxes) as client,
        sampler.lease(policy, "rollouts", experiment.engine) as engine,
    ):
        began = time.time()
        report = await run_shard(
            plan,
            shard,
            engine=engine,
            sandboxes=client,
            tasks=tasks,
            store=step.store,
            grader=Verifier(client, step.store),
            tokenizer=load_tokenizer(experiment, policy),
            vocabulary=vocabulary_of(policy),
            progress=lambda now: _show(step, now),
            limits=experiment.sandboxes.limits.limits(),
            seconds=_seconds_before(step) if _some_wait(plan, shard) else {},
        )
    return {
        "groups": report.groups,
        "found": report.groups_found,
        "refills": report.refills,
        "tokens": report.tokens,
        "began": began,
        "ended": time.time(),
    }


def _some_wait(plan: RolloutPlan, shard: int) -> bool:
    """Whether a shard has more episodes than it plays at once, so that their order matters."""
    groups, _ = plan.shard(shard)
    return len(groups) * plan.config.episodes_started > plan.config.concurrency


def _seconds_before(step: Step) -> dict[str, float]:
    """Mean seconds of an episode by task, in the last iterations whose rollouts are still in the store."""
    store, name = step.store, step.experiment.name
    earlier = [each for each in partitions(store, name, ROLLOUTS.name) if each < step.iteration]
    found = [read_artifact(store, name, ROLLOUTS.name, partition) for partition in earlier[-LOOKED_BACK:]]
    try:
        return seconds_of([each for each in found if each is not None])
    except ArtifactMissing:  # deleted in between; it is only about the order
        return {}


def _show(step: Step, now: ShardProgress) -> None:
    step.progress.update(
        f"sampling {now.shard}",
        now.episodes_done,
        now.episodes_total,
        groups=now.groups_done,
        tokens_per_second=now.tokens_per_second,
    )


def rollout_ops(experiment: Experiment) -> tuple[dg.OpDefinition, dg.OpDefinition, dg.OpDefinition]:
    """Ops (plan, shard, merge) of one experiment for its rollouts graph."""
    prefix = f"{experiment.name}_{ROLLOUTS.name}"
    common: dict[str, Any] = {
        "pool": pool_of(experiment, ROLLOUTS.name),
        "tags": pod_tags(experiment),
        "retry_policy": step_retries(),
    }

    @dg.op(
        name=f"{prefix}_plan",
        out=dg.DynamicOut(dict[str, Any]),
        description="Commit the plan and hand out its shards.",
        **common,
    )
    @bounded
    def plan(
        context: dg.OpExecutionContext,
        iteration_inputs: ArtifactRef,
        prompts: ArtifactRef,
        store: StoreResource,
        progress: dg.ResourceParam[ProgressSink],
    ) -> Iterator[dg.DynamicOutput[dict[str, Any]]]:
        given = {"iteration_inputs": iteration_inputs, "prompts": prompts}
        step = begin(context, experiment, ROLLOUTS, store.open(), progress, given)
        planned = make_plan(step)
        for shard in range(read_plan(planned).workers):
            value = {"plan": planned.ref.model_dump(mode="json"), "shard": shard}
            yield dg.DynamicOutput(value, mapping_key=f"shard{shard:04d}")

    @dg.op(
        name=f"{prefix}_shard",
        description="Sample and commit the groups of one shard.",
        **common,
    )
    @bounded
    def shard(
        context: dg.OpExecutionContext,
        part: dict[str, Any],
        store: StoreResource,
        sampler: SamplerResource,
        sandboxes: SandboxesResource,
        progress: dg.ResourceParam[ProgressSink],
    ) -> dict[str, Any]:
        step = begin(context, experiment, ROLLOUTS, store.open(), progress)
        made = open_artifact(step.store, ArtifactRef.model_validate(part["plan"]))
        planned = read_plan(made)
        if artifact_exists(step.store, ROLLOUTS.name, planned.key):
            context.log.info(f"rollouts {planned.key[:12]} are committed: nothing to sample")
            return part
        _require_unchanged(step, made)
        # after a fault of infrastructure committed groups stay, and the retry samples only what is missing
        report = run_async(sample_shard(step, planned, part["shard"], sampler, sandboxes))
        context.log.info(f"shard {part['shard']}: {json.dumps(report)}")
        return {**part, "sampled": report}

    @dg.op(
        name=f"{prefix}_merge",
        description="Merge all groups; fails unless every expected one is committed.",
        out={"result": dg.Out(REF), "check": dg.Out(dg.Nothing), "infrastructure": dg.Out(dg.Nothing)},
        **common,
    )
    @bounded
    def merge(
        context: dg.OpExecutionContext,
        parts: list[dict[str, Any]],
        store: StoreResource,
        progress: dg.ResourceParam[ProgressSink],
    ) -> Iterator[dg.Output[ArtifactRef] | dg.AssetCheckResult]:
        step = begin(context, experiment, ROLLOUTS, store.open(), progress)
        asset = dg.AssetKey([experiment.name, ROLLOUTS.name])
        planned = read_plan(open_artifact(step.store, ArtifactRef.model_validate(parts[0]["plan"])))
        gathered = gather_groups(planned, step.store)
        lacking = groups_lacking(planned, gathered, step.store)
        count = len(gathered.expected)
        names = [group.task_id for group in lacking[:20]]
        why = f"{len(lacking)} of {count} groups are lacking: {', '.join(names)}" if lacking else "No group is lacking."
        yield checked(CHECK, not lacking, why, expected=count, lacking=names)._replace(asset_key=asset)
        merged = merge_groups(planned, step.store, gathered)  # raises when any is lacking, and names them
        sampled = sampled_numbers([part["sampled"] for part in parts if "sampled" in part])
        yield infrastructure_held(merged.table("episodes.parquet", columns=["outcome"]), asset)
        yield output(merged, {**rollout_metadata(step, merged, planned), **speed_before(step), **sampled})

    return plan, shard, merge


def _require_unchanged(step: Step, plan: Artifact) -> None:
    """Raise IterationRefused if the experiment has other settings than the plan: each pod of a step reads its file."""
    for path, planned, now in differences(plan.manifest.config, ROLLOUTS.own_config(step.state)):
        raise IterationRefused(
            f"{field_of(path)} is {now!r}, and this run planned its rollouts with {planned!r}: {step.experiment.name}"
            " was edited meanwhile; re-execute all steps of the run"
        )


def groups_lacking(plan: RolloutPlan, gathered: Gathered, store: Store) -> list[GroupPlan]:
    """Groups that the plan requires and that are neither committed nor merged: none once there are rollouts, which are
    made of all of them.
    """
    return [] if artifact_exists(store, ROLLOUTS.name, plan.key) else gathered.missing


def rollout_metadata(step: Step, merged: Artifact, plan: RolloutPlan) -> dict[str, Any]:
    """Numbers for plots, and a few episodes to read."""
    policy = open_artifact(step.store, plan.policy)
    tokenizer = load_tokenizer(step.experiment, policy)
    tasks = load_tasks(step.store, plan.inputs["task_suite"])
    by = f"{plan.experiment}/{plan.iteration}"
    return {
        **({"sampled by": by} if by != f"{step.experiment.name}/{step.iteration}" else {}),
        **table_facts(merged.table("episodes.parquet")),
        "samples": sample_episodes(merged, tokenizer, tasks),
        **rollout_numbers(merged),
    }
