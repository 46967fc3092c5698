"""Compare candidate and parent on the gate (which decides) and on held-out and unseen (reported). Cached per (policy,
split).

    evaluation_run(candidate, gate) ---\\
    evaluation_run(parent, gate) --------> evaluation: pass rates, paired difference a split, each with its interval
    evaluation_run(best so far, gate) --/  and, on the gate, the difference from the best policy so far
    evaluation_run(.., held_out) ------/   and of each policy pass@1 greedy and sampled, maj@k, pass@k
    evaluation_run(.., held_out, greedy)
    the same of unseen

A run commits every task that is played and graded (contracts.parts): a killed one repeats those that were in flight.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa

from contracts.artifacts import Artifact, ArtifactRef, open_artifact
from contracts.episodes import (
    EPISODES,
    SEQUENCES,
    TELEMETRY,
    Episode,
    episodes_table,
    sequences_table,
    telemetry_table,
)
from contracts.failpoints import failpoint
from contracts.parts import Parts
from contracts.store import Store
from contracts.tasks import Split, Task
from curation.errors import TaskError
from curation.measures import Sample, measures, read_samples
from curation.rewards import REWARDS, RewardConfig, grade_episodes
from curation.statistics import paired_difference, pass_rate, solved_by_task
from curation.verify import Verifier
from inference.rollouts.episode import Player
from inference.rollouts.evaluate import evaluation_groups
from inference.rollouts.oversampling import Group
from inference.rollouts.progress import Meter, ShardProgress
from inference.rollouts.runner import play_groups
from ops.floor import compare_with_floor, find_floor
from ops.loading import load_tasks, load_tokenizer, split_tasks, vocabulary_of
from ops.readings import EVALUATION_SLOTS, WHO, Reading, readings_of
from ops.spec import Work
from ops.step import Step
from resources.errors import EvaluationIncomplete
from resources.evaluation import PlaySettings
from resources.loops import run_async
from resources.sampler import SamplerResource
from resources.sandboxes import SandboxesResource


def evaluate(step: Step, sampler: SamplerResource, sandboxes: SandboxesResource) -> Artifact:
    """The `evaluation` artifact of a candidate, its parent and, on the gate, the best policy so far.

    The base policy is played too where it has no run with these settings, so that the best so far is never unknown.
    """
    suite, base, parent = step.inputs.task_suite, step.inputs.base, step.inputs.started.checkpoint
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
    greedy = runs.get(f"{who}_{split}_greedy")
    return measures(run_samples(runs[f"{who}_{split}"]), run_samples(greedy) if greedy else {}, temperature)


def run_samples(run: Artifact) -> dict[str, list[Sample]]:
    """Graded samples of a run by task."""
    episodes = run.table("episodes.parquet", ["episode_id", "task_id", "final_diff"])
    return read_samples(episodes, run.table("rewards.parquet", ["episode_id", "solved"]))


TABLES = {
    "episodes.parquet": EPISODES,
    "sequences.parquet": SEQUENCES,
    "telemetry.parquet": TELEMETRY,
    "rewards.parquet": REWARDS,
}
"""Tables of an `evaluation_run` and of its parts, each of which holds one task."""


@dataclass(frozen=True)
class Playing:
    """What the readings of policies are played with."""

    store: Store
    settings: PlaySettings
    sampler: SamplerResource
    sandboxes: SandboxesResource
    show: Callable[..., None]
    """Called with (phase, done, total) and measurements by name, as StepProgress.update."""
    prepare: Callable[[Player, Sequence[Task]], Awaitable[None]] | None = None
    """Called with the tasks of missing readings before they are played; an error ends the call."""


def play_splits(
    step: Step, sampler: SamplerResource, sandboxes: SandboxesResource, policy: ArtifactRef, suite: ArtifactRef
) -> dict[str, Artifact]:
    """Runs of every reading of a step's experiment by name; missing runs are played."""
    playing = Playing(step.store, step.experiment, sampler, sandboxes, step.progress.update)
    return play_readings(playing, readings_of(step.experiment), policy, suite)


def play_readings(
    playing: Playing, readings: Sequence[Reading], policy: ArtifactRef, suite: ArtifactRef
) -> dict[str, Artifact]:
    """Runs of these readings by name; missing runs are played, and killed ones go on. Raises EvaluationIncomplete."""
    found: dict[str, Artifact] = {}
    missing: list[Reading] = []
    for each in readings:
        run = each.work(playing.store, playing.settings, policy, suite).find()
        if run is None:
            missing.append(each)
        else:
            found[each.name] = run
    if missing:
        found |= run_async(_play(playing, policy, suite, missing))
    return found


async def _play(
    playing: Playing, policy: ArtifactRef, suite: ArtifactRef, readings: list[Reading]
) -> dict[str, Artifact]:
    settings, checkpoint = playing.settings, open_artifact(playing.store, policy)
    async with (
        playing.sandboxes.client(settings.sandboxes) as client,
        playing.sampler.lease(checkpoint, "evaluation", settings.evaluation_engine) as engine,
    ):
        player = Player.of(
            engine,
            client,
            load_tokenizer(settings, checkpoint),
            settings.rollouts,
            policy_version=policy.digest,
            key="",  # each reading has its own
            limits=settings.sandboxes.limits.limits(),
            store=playing.store,
            vocabulary=vocabulary_of(checkpoint),
        )
        tasks, verifier = load_tasks(playing.store, suite), Verifier(client, playing.store)
        if playing.prepare is not None:
            await playing.prepare(player, [task for each in readings for task in split_tasks(tasks, each.split)])
        try:
            async with asyncio.TaskGroup() as running:
                started = {
                    each.name: running.create_task(
                        _play_reading(
                            playing,
                            each,
                            each.work(playing.store, settings, policy, suite),
                            player,
                            tasks,
                            verifier,
                        )
                    )
                    for each in readings
                }
        except BaseExceptionGroup as several:
            raise several.exceptions[0] from None
    return {name: task.result() for name, task in started.items()}


async def _play_reading(
    playing: Playing, reading: Reading, work: Work, player: Player, tasks: Mapping[str, Task], verifier: Verifier
) -> Artifact:
    """Play one reading and commit its run. All readings share the player's limit of episodes in flight."""
    name, temperature = reading.name.replace("_", " "), 0.0 if reading.greedy else player.config.temperature

    def show(now: ShardProgress) -> None:
        playing.show(name, now.episodes_done, now.episodes_total, tokens_per_second=now.tokens_per_second)

    groups = evaluation_groups(
        split_tasks(tasks, reading.split),
        reading.samples,
        experiment=EVALUATION_SLOTS,
        split=reading.split,
        seed=playing.settings.seed,
        key=work.key,
    )
    config = player.config.model_copy(update={"temperature": temperature, "record_routing": False})
    parts, allowed = Parts(playing.store, work.kind, work.key, TABLES.values()), playing.settings.ungraded_allowed
    commits = _TaskCommits(parts, await asyncio.to_thread(parts.read), tasks, verifier, allowed)
    played = await play_groups(replace(player, config=config, key=work.key), groups, commits, Meter(0, show))
    return await asyncio.to_thread(_commit_run, work, parts, reading, played, allowed)


class _TaskCommits:
    """Commits each task of a run as a part of it, once its episodes are graded."""

    def __init__(
        self,
        parts: Parts,
        found: Mapping[str, list[pa.Table]],
        tasks: Mapping[str, Task],
        verifier: Verifier,
        allowed: float,
    ) -> None:
        self._parts, self._found, self._tasks, self._verifier = parts, found, tasks, verifier
        # of one task, nothing or everything may be ungraded; `require_graded` asks about all of them
        self._config = RewardConfig(max_ungraded=1.0 if allowed else 0.0)

    async def find(self, group: Group) -> list[pa.Table] | None:
        """See Commits.find."""
        return self._found.get(group.group_id)

    async def commit(self, group: Group, episodes: list[Episode]) -> list[pa.Table]:
        """Grade and commit, unless an episode was lost to infrastructure: a later run may have more luck."""
        table = episodes_table(episodes)
        rewards = await grade_episodes(table, self._tasks, self._verifier, self._config, lambda done, total: None)
        tables = [table, sequences_table(episodes), telemetry_table(episodes), rewards]
        failpoint("task-sampled")
        if not rewards["solved"].null_count:
            await asyncio.to_thread(self._parts.add, group.group_id, tables)
        failpoint("task-committed")
        return tables


def _commit_run(
    work: Work, parts: Parts, reading: Reading, played: Sequence[Sequence[pa.Table]], allowed: float
) -> Artifact:
    """The `evaluation_run` of these tasks' tables, in their order. Raises EvaluationIncomplete."""
    tables = {
        name: pa.concat_tables([schema.empty_table(), *(part[place] for part in played)])
        for place, (name, schema) in enumerate(TABLES.items())
    }
    rewards = tables["rewards.parquet"]
    require_graded(rewards, allowed, f"policy {work.parents['policy'].short} on {reading.name.replace('_', ' ')}")
    with work.writer() as out:
        for name, table in tables.items():
            out.add_table(name, table, telemetry=name == "telemetry.parquet")
        rate = pass_rate(rewards)
        run = out.commit(meta={"split": reading.split.value, "pass_rate": rate.rate, "graded": rate.n})
        parts.discard()  # here, where a sweep of the stage makes up for a kill
        return run


def require_graded(rewards: pa.Table, allowed: float, what: str) -> None:
    """Refuse a run that lost more than the share `allowed` of its episodes; once committed, it would count permanently.

    Raises EvaluationIncomplete, and TaskError for a run without episodes.
    """
    if not len(rewards):
        raise TaskError(f"evaluation of {what} played no episode: the task suite has no tasks in this split")
    lost = rewards["solved"].null_count
    if lost > allowed * len(rewards) or lost == len(rewards):
        raise EvaluationIncomplete(
            f"evaluation of {what} lost {lost} of {len(rewards)} episodes to infrastructure faults; at most the share"
            f" {allowed} is allowed (rewards.max_ungraded, rollouts.profile). Only tasks without a lost episode are"
            " kept: check engine and envd in the log, then run the same step again"
        )
