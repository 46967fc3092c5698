"""Compare candidate and parent on the gate (which decides) and on held-out and unseen (reported). Cached per (policy,
split).

    evaluation_run(candidate, gate) ---\\
    evaluation_run(parent, gate) --------> evaluation: pass rates, paired difference a split, each with its interval
    evaluation_run(best so far, gate) --/  and, on the gate, the difference from the best policy so far
    evaluation_run(.., held_out) ------/   and of each policy pass@1 greedy and sampled, maj@k, pass@k
    evaluation_run(.., held_out, greedy)
    the same of unseen
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from contracts.artifacts import Artifact, ArtifactRef, open_artifact
from contracts.chat import ChatTokenizer
from contracts.episodes import episodes_table, sequences_table, telemetry_table
from contracts.tasks import Split, Task
from curation.measures import Sample, measures, read_samples
from curation.rewards import RewardConfig, grade_episodes
from curation.statistics import paired_difference, pass_rate, solved_by_task
from curation.verify import Verifier
from envd.client import SandboxClient
from inference.engines.base import Engine
from inference.rollouts.evaluate import run_episodes
from inference.rollouts.progress import ShardProgress
from ops.floor import compare_with_floor, find_floor
from ops.loading import load_tasks, load_tokenizer, split_tasks
from ops.readings import EVALUATION_SLOTS, WHO, Reading, readings_of
from ops.rewards import ungraded_allowed
from ops.step import Step
from resources.errors import EvaluationIncomplete
from resources.loops import run_async
from resources.sampler import SamplerResource
from resources.sandboxes import SandboxesResource


def evaluate(step: Step, sampler: SamplerResource, sandboxes: SandboxesResource) -> Artifact:
    """The `evaluation` artifact of a candidate, its parent and, on the gate, the best policy so far.

    The base policy is played too where it has no run with these settings, so that the best so far is never unknown.
    """
    suite, base, parent = step.inputs.task_suite, step.inputs.base, step.inputs.start.checkpoint
    runs: dict[str, Artifact] = {}
    for role, policy in (("base", base), ("parent", parent), ("candidate", step.state.made["checkpoint"])):
        for name, run in play_splits(step, sampler, sandboxes, policy, suite).items():
            if role != "base":
                runs[f"{role}_{name}"] = run
    floor = find_floor(step.store, step.experiment, parent, base, suite)
    if floor is not None:
        runs["best_gate"] = floor.run
    work = step.spec.work_on(step.state, {role: run.ref for role, run in runs.items()})
    found = work.find()
    if found is not None:
        return found
    confidence = step.experiment.promotion.confidence
    body = {
        each.name: compare(runs[f"candidate_{each.name}"], runs[f"parent_{each.name}"], confidence)
        for each in readings_of(step.experiment)
        if not each.greedy
    }
    for name, found_there in body.items():
        temperature = step.experiment.rollouts.temperature
        found_there["measures"] = {who: measure(runs, who, name, temperature) for who in WHO}
    if floor is not None:
        body[Split.GATE.value]["floor"] = compare_with_floor(runs["candidate_gate"], floor, confidence)
    with work.writer() as out:
        out.add_json("evaluation.json", body)
        return out.commit(meta={f"{split}_{who}": body[split][who]["rate"] for split in body for who in WHO})


def compare(candidate: Artifact, parent: Artifact, confidence: float) -> dict[str, Any]:
    """Pass rates of two runs on one split and their difference, paired by task. confidence: that of the difference's
    `bound`.
    """
    ours, theirs = candidate.table("rewards.parquet"), parent.table("rewards.parquet")
    return {
        "candidate": asdict(pass_rate(ours)),
        "parent": asdict(pass_rate(theirs)),
        "difference": asdict(paired_difference(solved_by_task(ours), solved_by_task(theirs), confidence)),
    }


def measure(runs: Mapping[str, Artifact], who: str, split: str, temperature: float) -> dict[str, Any]:
    """pass@1 greedy and sampled at `temperature`, maj@k and pass@k of a policy on a split."""
    return measures(_samples(runs[f"{who}_{split}"]), _samples(runs.get(f"{who}_{split}_greedy")), temperature)


def _samples(run: Artifact | None) -> dict[str, list[Sample]]:
    if run is None:
        return {}
    episodes = run.table("episodes.parquet", ["episode_id", "task_id", "final_diff"])
    return read_samples(episodes, run.table("rewards.parquet", ["episode_id", "solved"]))


def play_splits(
    step: Step, sampler: SamplerResource, sandboxes: SandboxesResource, policy: ArtifactRef, suite: ArtifactRef
) -> dict[str, Artifact]:
    """Runs of every reading by name; missing runs are played."""
    found: dict[str, Artifact] = {}
    missing: list[Reading] = []
    for each in readings_of(step.experiment):
        run = each.work(step.store, step.experiment, policy, suite).find()
        if run is None:
            missing.append(each)
        else:
            found[each.name] = run
    if missing:
        found |= run_async(_play(step, sampler, sandboxes, policy, suite, missing))
    return found


async def _play(
    step: Step,
    sampler: SamplerResource,
    sandboxes: SandboxesResource,
    policy: ArtifactRef,
    suite: ArtifactRef,
    readings: list[Reading],
) -> dict[str, Artifact]:
    tasks = load_tasks(step.store, suite)
    checkpoint = open_artifact(step.store, policy)
    experiment = step.experiment
    tokenizer = load_tokenizer(experiment, checkpoint)
    async with (
        sandboxes.client(experiment.sandboxes) as client,
        sampler.lease(checkpoint, "evaluation", experiment.engine) as engine,
    ):
        verifier, gate = Verifier(client, step.store), asyncio.Semaphore(experiment.rollouts.concurrency)
        try:
            async with asyncio.TaskGroup() as running:
                playing = {
                    each.name: running.create_task(
                        _play_reading(step, policy, suite, each, tasks, engine, client, tokenizer, verifier, gate)
                    )
                    for each in readings
                }
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
    return {name: task.result() for name, task in playing.items()}


async def _play_reading(
    step: Step,
    policy: ArtifactRef,
    suite: ArtifactRef,
    reading: Reading,
    tasks: dict[str, Task],
    engine: Engine,
    client: SandboxClient,
    tokenizer: ChatTokenizer,
    verifier: Verifier,
    gate: asyncio.Semaphore,
) -> Artifact:
    experiment = step.experiment
    work, name = reading.work(step.store, experiment, policy, suite), reading.name.replace("_", " ")
    config = experiment.rollouts.model_copy(update={"temperature": 0.0}) if reading.greedy else experiment.rollouts

    def playing(now: ShardProgress) -> None:
        step.progress.update(name, now.episodes_done, now.episodes_total, tokens_per_second=now.tokens_per_second)

    episodes = await run_episodes(
        split_tasks(tasks, reading.split),
        reading.samples,
        experiment=EVALUATION_SLOTS,
        split=reading.split,
        seed=experiment.seed,
        key=work.key,
        policy_version=policy.digest,
        config=config,
        engine=engine,
        sandboxes=client,
        tokenizer=tokenizer,
        progress=playing,
        limits=experiment.sandboxes.limits.limits(),
        gate=gate,
    )
    table = episodes_table(episodes)
    allowed = ungraded_allowed(experiment)
    rewards = await grade_episodes(
        table,
        tasks,
        verifier,
        RewardConfig(max_ungraded=allowed),
        lambda done, total: step.progress.update(f"grading {name}", done, total),
    )
    require_graded(rewards, allowed, f"policy {policy.short} on {name}")
    with work.writer() as out:
        out.add_table("episodes.parquet", table)
        out.add_table("sequences.parquet", sequences_table(episodes))
        out.add_table("telemetry.parquet", telemetry_table(episodes), telemetry=True)
        out.add_table("rewards.parquet", rewards)
        rate = pass_rate(rewards)
        return out.commit(meta={"split": reading.split.value, "pass_rate": rate.rate, "graded": rate.n})


def require_graded(rewards: pa.Table, allowed: float, what: str) -> None:
    """Refuse a run that lost more than the share `allowed` of its episodes; once committed, it would count permanently.

    Raises EvaluationIncomplete.
    """
    lost = rewards["solved"].null_count
    if lost > allowed * len(rewards) or lost == len(rewards):
        raise EvaluationIncomplete(
            f"evaluation of {what} lost {lost} of {len(rewards)} episodes to infrastructure faults; at most the share"
            f" {allowed} is allowed (rewards.max_ungraded, rollouts.profile). Nothing was committed: check engine and"
            " envd in the log, then run the same step again"
        )
