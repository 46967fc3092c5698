"""Rewards: what each episode's final state and conduct are worth.

    reward = solved * [hidden tests pass on the final state] + valid * [ended by itself, no format error, an edit that took]

Re-gradable: verdicts are looked up by (task, final state, verifier version), so a new verifier or new weights grade old rollouts again;
`flips` says what that changed. An infrastructure failure is a null reward, never 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import duckdb
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from contracts.artifacts import Artifact
from contracts.episodes import Outcome
from contracts.tasks import Task
from curation.errors import GradingIncomplete, InfraFault, RewardsMismatch
from curation.verify import VERIFIER_VERSION, Verdict, Verifier

REWARDS_VERSION = f"1+verifier{VERIFIER_VERSION}"
"""Code version of the `rewards` step; a new verifier is a new action key."""

_COMPONENT = pa.struct([("name", pa.string()), ("value", pa.float32())])

REWARDS = pa.schema(
    [
        ("episode_id", pa.string()),
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("reward", pa.float32()),
        ("solved", pa.bool_()),
        ("components", pa.list_(_COMPONENT)),
        ("verdict", pa.string()),
        ("tests_passed", pa.int32()),
        ("tests_total", pa.int32()),
    ]
)
"""One row an episode, in the order of `episodes`. reward and solved are null where nothing may be learned (see UNSCORED, `not_graded`).

`verdict` is how the hidden tests' run ended (completed, crashed, timed_out, apply_failed), the outcome of an unscored episode
(infra_error, aborted), or not_graded when the verifier's infrastructure failed.
"""

UNSCORED = (Outcome.INFRA_ERROR.value, Outcome.ABORTED.value)
"""Outcomes that say nothing about the policy."""

EDITING_TOOLS = ("edit", "write")


class RewardConfig(BaseModel):
    """Weights of the reward's components."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    solved: float = Field(default=1.0, allow_inf_nan=False)
    """For a final state that passes every hidden test."""
    valid: float = Field(default=0.1, allow_inf_nan=False)
    """For an episode that ended by itself, without a format error and with at least one edit that took."""
    max_ungraded: float = Field(default=0.05, ge=0, le=1)
    """Share of the episodes that may stay ungraded for infrastructure faults; above it the step fails instead of training on a remainder."""


async def grade_rollouts(
    rollouts: Artifact,
    tasks: Mapping[str, Task],
    verifier: Verifier,
    config: RewardConfig,
    progress: Callable[[int, int], None],
) -> pa.Table:
    """Rows of REWARDS for every episode of a `rollouts` artifact. See `grade_episodes`."""
    return await grade_episodes(rollouts.table("episodes.parquet"), tasks, verifier, config, progress)


async def grade_episodes(
    episodes: pa.Table,
    tasks: Mapping[str, Task],
    verifier: Verifier,
    config: RewardConfig,
    progress: Callable[[int, int], None],
) -> pa.Table:
    """Rows of REWARDS for a table of EPISODES, in its order. progress: (graded, total), after each episode.

    Raises RewardsMismatch when an episode's task is unknown or has changed, GradingIncomplete beyond `config.max_ungraded`.
    """
    rows = episodes.select(_READ).to_pylist()
    for row in rows:
        _check_task(row, tasks)
    allowed = config.max_ungraded * len(rows)
    done = faults = 0

    async def grade(row: dict[str, Any]) -> dict[str, Any]:
        nonlocal done, faults
        verdict: Verdict | None = None
        if row["outcome"] not in UNSCORED:
            try:
                verdict = await verifier.grade(tasks[row["task_id"]], row["final_diff"])
            except InfraFault as fault:
                faults += 1
                if faults > allowed:
                    raise GradingIncomplete(
                        f"{faults} of {len(rows)} episodes could not be graded, more than rewards.max_ungraded={config.max_ungraded} "
                        f"allows; verdicts so far are kept, run the same step again. Last fault: {fault}"
                    ) from fault
        done += 1
        progress(done, len(rows))
        return reward_row(row, verdict, config)

    work = [asyncio.ensure_future(grade(row)) for row in rows]
    try:
        graded = await asyncio.gather(*work)
    finally:
        for each in work:
            each.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    return pa.Table.from_pylist(graded, schema=REWARDS)


_READ = ["episode_id", "group_id", "task_id", "task_digest", "outcome", "tool_calls", "format_errors", "final_diff"]


def reward_row(episode: Mapping[str, Any], verdict: Verdict | None, config: RewardConfig) -> dict[str, Any]:
    """One row of REWARDS from a row of EPISODES. verdict None: not graded, so no reward."""
    row: dict[str, Any] = {name: episode[name] for name in ("episode_id", "group_id", "task_id")}
    if verdict is None:
        reason = episode["outcome"] if episode["outcome"] in UNSCORED else "not_graded"
        return row | {"components": [], "verdict": reason, "tests_passed": 0, "tests_total": 0}
    components = {"solved": config.solved * verdict.solved, "valid": config.valid * is_valid(episode)}
    return row | {
        "reward": sum(components.values()),
        "solved": verdict.solved,
        "components": [{"name": name, "value": value} for name, value in components.items()],
        "verdict": verdict.exit,
        "tests_passed": verdict.tests_passed,
        "tests_total": verdict.tests_total,
    }


def is_valid(episode: Mapping[str, Any]) -> bool:
    """Whether an episode was conducted well: ended by the policy, every call parsed, at least one edit took."""
    edited = any(call["ok"] and call["name"] in EDITING_TOOLS for call in episode["tool_calls"])
    return bool(episode["outcome"] == Outcome.COMPLETED and episode["format_errors"] == 0 and edited)


def flips(old: pa.Table, new: pa.Table) -> pa.Table:
    """Episodes whose reward differs between two gradings, by episode_id; null where a grading has no reward for one."""
    with duckdb.connect() as db:
        db.register("old_rewards", old)
        db.register("new_rewards", new)
        return db.sql(_FLIPS).to_arrow_table().cast(FLIPS)


FLIPS = pa.schema(
    [
        ("episode_id", pa.string()),
        ("task_id", pa.string()),
        ("old_reward", pa.float32()),
        ("new_reward", pa.float32()),
        ("old_verdict", pa.string()),
        ("new_verdict", pa.string()),
    ]
)
"""What `flips` returns."""

_FLIPS = """
SELECT
    coalesce(o.episode_id, n.episode_id) AS episode_id,
    coalesce(o.task_id, n.task_id) AS task_id,
    o.reward AS old_reward, n.reward AS new_reward,
    o.verdict AS old_verdict, n.verdict AS new_verdict
FROM old_rewards o FULL JOIN new_rewards n ON o.episode_id = n.episode_id
WHERE o.reward IS DISTINCT FROM n.reward
ORDER BY 1
"""


def _check_task(row: Mapping[str, Any], tasks: Mapping[str, Task]) -> None:
    task = tasks.get(row["task_id"])
    if task is None:
        raise RewardsMismatch(
            f"episode {row['episode_id']} is of task {row['task_id']}, which this suite lacks: grade with the suite the rollouts name as parent"
        )
    if task.digest != row["task_digest"]:
        raise RewardsMismatch(
            f"task {row['task_id']} is not what episode {row['episode_id']} was played on ({task.digest[:12]}, was {row['task_digest'][:12]}): "
            "grade with the suite the rollouts name as parent"
        )
