"""Grade a table of episodes into rewards and their evidence.

    verdict (hidden tests, CPU) --.
    judges, reward models (network) +--> shapers --> sum of weight * clip(value) --> REWARDS, EVIDENCE
                 side by side ----'

Old rollouts can be graded again with a new verifier or new weights: verdicts are cached by (task, final state, verifier
version) and replies by question; `flips` lists the differences. An infrastructure failure gives a null reward, never 0.
A state that tampers, or that alone cannot be graded, earns neither `solved` nor `valid`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from contracts import tracing
from contracts.artifacts import Artifact
from contracts.chat import ChatTokenizer
from contracts.episodes import SEQUENCES, Outcome
from contracts.errors import InfraFault
from contracts.store import Store
from contracts.tasks import Task
from curation.errors import GradingIncomplete, RewardsMismatch
from curation.rewards.config import RewardConfig
from curation.rewards.raters import Raters, contribution
from curation.rewards.shapers import Shaper
from curation.rewards.tables import EVIDENCE, REWARDS
from curation.rewards.traces import Rating
from curation.rewards.transcripts import Transcripts
from curation.verdicts import VERIFIER_VERSION, Verdict
from curation.verify import Verifier

REWARDS_VERSION = f"3+verifier{VERIFIER_VERSION}"
"""Code version of the `rewards` step; a new verifier is a new action key."""

UNSCORED = (Outcome.INFRA_ERROR.value, Outcome.ABORTED.value, Outcome.DROPPED.value)
"""Outcomes that are not the policy's."""

SANDBOX_BROKEN = "sandbox_broken"
"""Verdict of an episode whose agent broke its own sandbox: it left no final state to grade, and scores 0."""

EDITING_TOOLS = ("edit", "write")

Progress = Callable[[int, int], None]

_READ = [
    "episode_id",
    "group_id",
    "task_id",
    "task_digest",
    "outcome",
    "turns",
    "tool_calls",
    "format_errors",
    "policy_tokens",
    "final_state",
    "final_diff",
]


@dataclass(frozen=True)
class Graded:
    """Result of grading."""

    rewards: pa.Table
    """Rows of REWARDS, in the episodes' order."""
    evidence: pa.Table
    """Rows of EVIDENCE; none where no component is configured."""


async def grade_rollouts(
    rollouts: Artifact,
    tasks: Mapping[str, Task],
    verifier: Verifier,
    config: RewardConfig,
    progress: Progress,
    *,
    store: Store,
    tokenizer: Callable[[], ChatTokenizer],
) -> Graded:
    """Grade every episode of a `rollouts` artifact. tokenizer: loads the acting policy's tokenizer if a component reads
    transcripts.

    Raises the errors of `grade_episodes`, and CurationError for a misconfigured endpoint.
    """
    transcripts = (
        Transcripts(rollouts.table("sequences.parquet", SEQUENCES.names), tokenizer()) if config.asked else None
    )
    async with Raters(config, store, transcripts) as raters:
        return await _grade(rollouts.table("episodes.parquet"), tasks, verifier, config, progress, raters)


async def grade_episodes(
    episodes: pa.Table, tasks: Mapping[str, Task], verifier: Verifier, config: RewardConfig, progress: Progress
) -> pa.Table:
    """Rows of REWARDS for a table of EPISODES, in its order. progress: (graded, total), after each episode.

    Raises RewardsMismatch if an episode's task is unknown or has changed or a component needs transcripts,
    GradingIncomplete beyond `config.max_ungraded`.
    """
    async with Raters(config, None, None) as raters:
        return (await _grade(episodes, tasks, verifier, config, progress, raters)).rewards


async def _grade(
    episodes: pa.Table,
    tasks: Mapping[str, Task],
    verifier: Verifier,
    config: RewardConfig,
    progress: Progress,
    raters: Raters,
) -> Graded:
    rows = episodes.select(_READ).to_pylist()
    for row in rows:
        _check_task(row, tasks)
    faults = _Faults(config.max_ungraded, len(rows))
    done = 0

    async def grade(row: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        nonlocal done
        with tracing.span("reward", {f"triplane.{name}": row[f"{name}_id"] for name in ("group", "episode")}):
            found = await _grade_one(row, tasks[row["task_id"]], verifier, config, raters)
        if found.fault is not None:
            faults.add(found.fault)
        done += 1
        progress(done, len(rows))
        return reward_row(row, found.verdict, config, found.ratings), _evidence(row, config, found.ratings)

    work = [asyncio.ensure_future(grade(row)) for row in rows]
    try:
        graded = await asyncio.gather(*work)
    finally:
        for each in work:
            each.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    return Graded(
        pa.Table.from_pylist([row for row, _ in graded], schema=REWARDS),
        pa.Table.from_pylist([line for _, lines in graded for line in lines], schema=EVIDENCE),
    )


@dataclass(frozen=True)
class _Found:
    """Result of one episode. fault: reason why it has no reward although it should have one."""

    verdict: Verdict | None
    ratings: dict[str, Rating]
    fault: Exception | str | None


async def _grade_one(
    row: Mapping[str, Any], task: Task, verifier: Verifier, config: RewardConfig, raters: Raters
) -> _Found:
    if row["outcome"] in (*UNSCORED, Outcome.FAILED):
        return _Found(None, {}, None)
    # an infrastructure fault is a result here: other work for the episode continues, and is cached for the next run
    done: list[Any] = await asyncio.gather(
        (verifier.confirm if config.pays_tests else verifier.grade)(task, row["final_diff"]),
        *(raters.ask(component, row, task) for component in config.asked),
        return_exceptions=True,
    )
    for each in done:
        if isinstance(each, BaseException) and not isinstance(each, InfraFault):
            raise each
    verdict, *asked = done
    ratings = {
        component.name: Rating(None, str(rating)) if isinstance(rating, InfraFault) else rating
        for component, rating in zip(config.asked, asked, strict=True)
    }
    if isinstance(verdict, InfraFault):
        return _Found(None, ratings, verdict)
    for component in config.components:
        if isinstance(component, Shaper):
            ratings[component.name] = component.rate(row, verdict, task)
    missing = next((rating.reason for rating in ratings.values() if rating.value is None), None)
    return _Found(verdict, ratings, missing)


class _Faults:
    """Counter of episodes without a grade; raises if there are too many."""

    def __init__(self, share: float, total: int) -> None:
        self._share, self._total, self._count = share, total, 0

    def add(self, fault: Exception | str) -> None:
        self._count += 1
        if self._count > self._share * self._total:
            raise GradingIncomplete(
                f"{self._count} of {self._total} episodes could not be graded, more than"
                f" rewards.max_ungraded={self._share} allows; verdicts and answers so far are kept. Last fault: {fault}"
            ) from (fault if isinstance(fault, Exception) else None)


def reward_row(
    episode: Mapping[str, Any],
    verdict: Verdict | None,
    config: RewardConfig,
    ratings: Mapping[str, Rating] | None = None,
) -> dict[str, Any]:
    """Row of REWARDS from a row of EPISODES. verdict None: not graded, no reward. ratings: by component name."""
    row: dict[str, Any] = {name: episode[name] for name in ("episode_id", "group_id", "task_id")}
    if episode["outcome"] == Outcome.FAILED:
        return row | {
            "reward": 0.0,
            "solved": False,
            "components": [],
            "verdict": SANDBOX_BROKEN,
            "tests_passed": 0,
            "tests_total": 0,
        }
    if verdict is None:
        reason = episode["outcome"] if episode["outcome"] in UNSCORED else "not_graded"
        return row | {"components": [], "verdict": reason, "tests_passed": 0, "tests_total": 0, "findings": []}
    gradable = verdict.exit != "ungradable" and not verdict.tampered
    parts: dict[str, float | None] = {
        "solved": config.solved * verdict.solved,
        "valid": config.valid * (gradable and is_valid(episode)),
    }
    parts |= {each.name: contribution(each, (ratings or {})[each.name]) for each in config.components}
    known = [value for value in parts.values() if value is not None]
    return row | {
        "reward": sum(known) if len(known) == len(parts) else None,
        "solved": verdict.solved,
        "components": [{"name": name, "value": value} for name, value in parts.items()],
        "verdict": "tampered" if verdict.tampered else verdict.exit,
        "tests_passed": verdict.tests_passed,
        "tests_total": verdict.tests_total,
        "findings": [each.name for each in verdict.findings],
    }


def _evidence(episode: Mapping[str, Any], config: RewardConfig, ratings: Mapping[str, Rating]) -> list[dict[str, Any]]:
    found = []
    for component in config.components:
        rating = ratings.get(component.name)
        if rating is not None:
            value = None if rating.value is None else component.clip(rating.value)
            found.append(
                {
                    "episode_id": episode["episode_id"],
                    "component": component.name,
                    "raw": rating.value,
                    "value": value,
                    "reason": rating.reason,
                    "answers": list(rating.answers),
                }
            )
    return found


def is_valid(episode: Mapping[str, Any]) -> bool:
    """Whether an episode was conducted well: ended by the policy, every call parsed, at least one successful edit; of
    an episode whose final state is no diff, there is one.
    """
    if any(state["kind"] != "diff" for state in episode.get("final_state") or ()):
        edited = bool(episode["final_diff"])
    else:
        edited = any(call["ok"] and call["name"] in EDITING_TOOLS for call in episode["tool_calls"])
    return bool(episode["outcome"] == Outcome.COMPLETED and episode["format_errors"] == 0 and edited)


def _check_task(row: Mapping[str, Any], tasks: Mapping[str, Task]) -> None:
    task = tasks.get(row["task_id"])
    if task is None:
        raise RewardsMismatch(
            f"episode {row['episode_id']} is of task {row['task_id']}, which this suite lacks: grade with the suite the"
            " rollouts name as parent"
        )
    if task.digest != row["task_digest"]:
        raise RewardsMismatch(
            f"task {row['task_id']} has changed since episode {row['episode_id']} ({task.digest[:12]}, was"
            f" {row['task_digest'][:12]}): grade with the suite the rollouts name as parent"
        )
