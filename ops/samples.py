"""A few episodes as a person reads them, for the asset pages."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import dagster as dg

from contracts.artifacts import Artifact
from contracts.chat import ChatTokenizer
from contracts.tasks import Task
from ops.results import markdown_table

SAMPLES = 6
MAX_TEXT = 1500
"""Characters of one transcript."""


def sample_episodes(
    rollouts: Artifact, tokenizer: ChatTokenizer, tasks: Mapping[str, Task], rewards: Artifact | None = None
) -> dg.MarkdownMetadataValue:
    """A table of episodes spread over the artifact: task, outcome, reward, tool calls and the text the tokens stand for."""
    episodes = rollouts.table(
        "episodes.parquet", columns=["episode_id", "task_id", "outcome", "turns", "policy_tokens"]
    )
    if not episodes.num_rows:
        return markdown_table([])
    stride = max(1, episodes.num_rows // SAMPLES)
    chosen = episodes.take(list(range(0, episodes.num_rows, stride))[:SAMPLES]).to_pylist()
    ids = {row["episode_id"] for row in chosen}
    tokens = _tokens(rollouts, ids)
    graded = _rewards(rewards, ids) if rewards else {}
    return markdown_table([_row(row, tokens, graded, tokenizer, tasks) for row in chosen])


def _row(
    row: Mapping[str, Any], tokens: Mapping[str, list[int]], graded: Mapping[str, Any], tokenizer: ChatTokenizer,
    tasks: Mapping[str, Task],
) -> dict[str, Any]:  # fmt: skip
    text = tokenizer.decode(tokens.get(row["episode_id"], []))
    task = tasks.get(row["task_id"])
    shown: dict[str, Any] = {
        "episode": row["episode_id"][:12],
        "task": row["task_id"],
        "asked": html.escape(task.instruction) if task else "",
        "outcome": row["outcome"],
    }
    if graded:
        shown["reward"] = graded.get(row["episode_id"])
    return shown | {
        "turns": row["turns"],
        "tokens": row["policy_tokens"],
        "transcript": html.escape(text[:MAX_TEXT]),
    }


def _tokens(rollouts: Artifact, ids: set[str]) -> dict[str, list[int]]:
    table = rollouts.table("sequences.parquet", columns=["episode_id", "token_ids"])
    keep = [index for index, each in enumerate(table["episode_id"].to_pylist()) if each in ids]
    return {row["episode_id"]: row["token_ids"] for row in table.take(keep).to_pylist()}


def _rewards(rewards: Artifact, ids: set[str]) -> dict[str, float | None]:
    table = rewards.table("rewards.parquet", columns=["episode_id", "reward"])
    return {row["episode_id"]: row["reward"] for row in table.to_pylist() if row["episode_id"] in ids}
