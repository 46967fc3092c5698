"""Render a few episodes for the asset pages."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

import dagster as dg

from contracts.artifacts import Artifact
from contracts.chat import ChatTokenizer
from contracts.tasks import Task

SAMPLES = 4
MAX_TEXT = 1500
"""Maximum characters of one transcript."""


def sample_episodes(
    rollouts: Artifact, tokenizer: ChatTokenizer, tasks: Mapping[str, Task], rewards: Artifact | None = None
) -> dg.MarkdownMetadataValue:
    """Markdown of a few evenly spaced episodes, each with task, outcome and decoded text."""
    episodes = rollouts.table(
        "episodes.parquet", columns=["episode_id", "task_id", "outcome", "turns", "policy_tokens"]
    )
    if not episodes.num_rows:
        return dg.MetadataValue.md("nothing to show")
    stride = max(1, episodes.num_rows // SAMPLES)
    chosen = episodes.take(list(range(0, episodes.num_rows, stride))[:SAMPLES]).to_pylist()
    ids = {row["episode_id"] for row in chosen}
    tokens = _tokens(rollouts, ids)
    graded = _rewards(rewards, ids) if rewards else None
    shown = [_episode(row, tokenizer.decode(tokens.get(row["episode_id"], [])), graded, tasks) for row in chosen]
    return dg.MetadataValue.md("\n\n".join(shown))


def _episode(
    row: Mapping[str, Any], text: str, graded: Mapping[str, float | None] | None, tasks: Mapping[str, Task]
) -> str:
    task = tasks.get(row["task_id"])
    facts = [row["outcome"].replace("_", " "), f"{row['turns']} turns", f"{row['policy_tokens']} tokens"]
    if graded is not None:
        reward = graded.get(row["episode_id"])
        facts.insert(1, "not graded" if reward is None else f"reward {reward:.3g}")
    head = f"**{html.escape(row['task_id'])}**: {', '.join(facts)}, `triplane episodes show {row['episode_id'][:12]}`"
    asked = f"{html.escape(task.instruction[:MAX_TEXT])}\n\n" if task else ""
    return f"{head}\n\n{asked}{fenced(text[:MAX_TEXT])}"


def fenced(text: str) -> str:
    """Markdown code block whose fence does not occur in `text`."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def _tokens(rollouts: Artifact, ids: set[str]) -> dict[str, list[int]]:
    table = rollouts.table("sequences.parquet", columns=["episode_id", "token_ids"])
    keep = [index for index, each in enumerate(table["episode_id"].to_pylist()) if each in ids]
    return {row["episode_id"]: row["token_ids"] for row in table.take(keep).to_pylist()}


def _rewards(rewards: Artifact, ids: set[str]) -> dict[str, float | None]:
    table = rewards.table("rewards.parquet", columns=["episode_id", "reward"])
    return {row["episode_id"]: row["reward"] for row in table.to_pylist() if row["episode_id"] in ids}
