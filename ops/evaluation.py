"""Candidate against parent on the gate (which decides) and on held-out (which is only reported). A policy plays a split once, ever.

    evaluation_run(candidate, gate) ---\\
    evaluation_run(parent, gate) --------> evaluation: pass rates, paired difference a split, each with its interval
    evaluation_run(best so far, gate) --/  and, on the gate, the difference from the best policy so far
    evaluation_run(.., held_out) ------/
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import pyarrow as pa

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter, find_artifact, open_artifact
from contracts.chat import ChatTokenizer
from contracts.episodes import episodes_table, sequences_table, telemetry_table
from contracts.tasks import Split, Task
from curation.rewards import RewardConfig, grade_episodes
from curation.statistics import paired_difference, pass_rate, solved_by_task
from curation.verify import Verifier
from envd.client import SandboxClient
from inference.engines.base import Engine
from inference.rollouts.evaluate import run_episodes
from inference.rollouts.progress import ShardProgress
from ops import keys
from ops.floor import compare_with_floor, find_floor
from ops.grading import ungraded_allowed
from ops.inputs import load_tasks, split_tasks
from ops.step import Step
from resources.errors import EvaluationIncomplete
from resources.experiment import Experiment
from resources.loops import run_async
from resources.sampler import SamplerResource
from resources.sandboxes import SandboxesResource


def samples_of(experiment: Experiment) -> dict[Split, int]:
    """Episodes a task, of each split that is played."""
    config = experiment.evaluation
    return {
        split: samples
        for split, samples in ((Split.GATE, config.gate_samples), (Split.HELD_OUT, config.held_out_samples))
        if samples
    }


def evaluate(
    step: Step,
    sampler: SamplerResource,
    sandboxes: SandboxesResource,
    candidate: ArtifactRef,
    parent: ArtifactRef,
    suite: ArtifactRef,
    base: ArtifactRef,
) -> Artifact:
    """The `evaluation` artifact of a candidate, its parent and, on the gate, the best policy so far.

    base: the base policy, played too where it has no run with these settings, so that the best so far is never unknown.
    """
    runs: dict[str, Artifact] = {}
    for role, policy in (("base", base), ("parent", parent), ("candidate", candidate)):
        for split, run in play_splits(step, sampler, sandboxes, policy, suite).items():
            if role != "base":
                runs[f"{role}_{split.value}"] = run
    floor = find_floor(step.store, step.experiment, parent, base, suite)
    if floor is not None:
        runs["best_gate"] = floor.run
    refs = {role: run.ref for role, run in runs.items()}
    key = keys.evaluation_key(step.experiment, refs)
    found = find_artifact(step.store, "evaluation", key)
    if found is not None:
        return found
    confidence = step.experiment.promotion.confidence
    body = {
        split.value: compare(runs[f"candidate_{split.value}"], runs[f"parent_{split.value}"], confidence)
        for split in samples_of(step.experiment)
    }
    if floor is not None:
        body[Split.GATE.value]["floor"] = compare_with_floor(runs["candidate_gate"], floor, confidence)
    parents = {**refs, "candidate": candidate, "parent": parent}
    with ArtifactWriter(
        step.store,
        "evaluation",
        key,
        parents=parents,
        config={"confidence": confidence},
        code_version=keys.EVALUATION_VERSION,
    ) as out:
        out.add_json("evaluation.json", body)
        return out.commit(
            meta={f"{split}_{who}": body[split][who]["rate"] for split in body for who in ("candidate", "parent")}
        )


def compare(candidate: Artifact, parent: Artifact, confidence: float) -> dict[str, Any]:
    """Pass rates of two runs on one split and their difference, paired by task. confidence: of the difference's `bound`."""
    ours, theirs = candidate.table("rewards.parquet"), parent.table("rewards.parquet")
    return {
        "candidate": asdict(pass_rate(ours)),
        "parent": asdict(pass_rate(theirs)),
        "difference": asdict(paired_difference(solved_by_task(ours), solved_by_task(theirs), confidence)),
    }


def play_splits(
    step: Step, sampler: SamplerResource, sandboxes: SandboxesResource, policy: ArtifactRef, suite: ArtifactRef
) -> dict[Split, Artifact]:
    """The policy's run on every split, played where it is missing."""
    found: dict[Split, Artifact] = {}
    missing: dict[Split, int] = {}
    for split, samples in samples_of(step.experiment).items():
        run = find_artifact(
            step.store, "evaluation_run", keys.evaluation_run_key(step.experiment, policy, suite, split, samples)
        )
        if run is None:
            missing[split] = samples
        else:
            found[split] = run
    if missing:
        found |= run_async(_play(step, sampler, sandboxes, policy, suite, missing))
    return found


async def _play(
    step: Step, sampler: SamplerResource, sandboxes: SandboxesResource, policy: ArtifactRef, suite: ArtifactRef,
    splits: dict[Split, int],
) -> dict[Split, Artifact]:  # fmt: skip
    tasks = load_tasks(step.store, suite)
    checkpoint = open_artifact(step.store, policy)
    experiment = step.experiment
    tokenizer = ChatTokenizer.from_directory(checkpoint.directory(), spaced=experiment.base.spaced)
    async with (
        sandboxes.client(experiment.sandboxes) as client,
        sampler.lease(checkpoint, "evaluation", experiment.engine) as engine,
    ):
        verifier = Verifier(client, step.store)
        try:
            async with asyncio.TaskGroup() as running:
                playing = {
                    split: running.create_task(
                        _play_split(step, policy, suite, split, samples, tasks, engine, client, tokenizer, verifier)
                    )
                    for split, samples in splits.items()
                }
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
    return {split: task.result() for split, task in playing.items()}


async def _play_split(
    step: Step, policy: ArtifactRef, suite: ArtifactRef, split: Split, samples: int, tasks: dict[str, Task], engine: Engine,
    client: SandboxClient, tokenizer: ChatTokenizer, verifier: Verifier,
) -> Artifact:  # fmt: skip
    experiment = step.experiment
    key = keys.evaluation_run_key(experiment, policy, suite, split, samples)

    def playing(now: ShardProgress) -> None:
        step.progress.update(
            split.value, now.episodes_done, now.episodes_total, tokens_per_second=now.tokens_per_second
        )

    episodes = await run_episodes(
        split_tasks(tasks, split), samples, experiment=keys.EVALUATION_SLOTS, split=split, seed=experiment.seed, key=key,
        policy_version=policy.digest, config=experiment.rollouts, engine=engine, sandboxes=client, tokenizer=tokenizer,
        progress=playing, limits=experiment.sandboxes.limits.limits(),
    )  # fmt: skip
    table = episodes_table(episodes)
    allowed = ungraded_allowed(experiment)
    rewards = await grade_episodes(
        table, tasks, verifier, RewardConfig(max_ungraded=allowed),
        lambda done, total: step.progress.update(f"grading {split.value}", done, total),
    )  # fmt: skip
    require_graded(rewards, allowed, f"policy {policy.short} on {split.value}")
    with ArtifactWriter(
        step.store, "evaluation_run", key, parents={"policy": policy, "task_suite": suite},
        config=keys.evaluation_slice(experiment, split, samples), code_version=keys.EVALUATION_RUN_VERSION,
    ) as out:  # fmt: skip
        out.add_table("episodes.parquet", table)
        out.add_table("sequences.parquet", sequences_table(episodes))
        out.add_table("telemetry.parquet", telemetry_table(episodes), telemetry=True)
        out.add_table("rewards.parquet", rewards)
        rate = pass_rate(rewards)
        return out.commit(meta={"split": split.value, "pass_rate": rate.rate, "graded": rate.n})


def require_graded(rewards: pa.Table, allowed: float, what: str) -> None:
    """Refuse a run that lost more than the share `allowed` of its episodes, whoever lost them: committed, it would judge for ever.

    Raises EvaluationIncomplete.
    """
    lost = rewards["solved"].null_count
    if lost > allowed * len(rewards) or lost == len(rewards):
        raise EvaluationIncomplete(
            f"evaluation of {what} lost {lost} of {len(rewards)} episodes to infrastructure faults, more than the share "
            f"{allowed} that rewards.max_ungraded and the profile allow; nothing was committed: see the log, check engine and envd, run the same step again"
        )
