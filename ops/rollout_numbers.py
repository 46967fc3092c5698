"""What an iteration's episodes look like in numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow.compute as pc

from contracts.artifacts import Artifact
from ops.results import numbers


def rollout_numbers(rollouts: Artifact) -> dict[str, Any]:
    """Counts, means and costs of a `rollouts` or `evaluation_run` artifact."""
    episodes = rollouts.table("episodes.parquet", columns=["outcome", "turns", "policy_tokens", "format_errors"])
    telemetry = rollouts.table("telemetry.parquet")
    total = max(1, episodes.num_rows)
    found: dict[str, Any] = {**numbers(rollouts.meta), "episodes": episodes.num_rows}
    for column in ("turns", "policy_tokens", "format_errors"):
        found[f"{column} mean"] = pc.mean(episodes[column]).as_py()
    for column in ("seconds", "sampling_seconds", "tool_seconds"):
        found[f"{column} mean"] = pc.mean(telemetry[column]).as_py()
    for outcome, count in sorted(Counter(episodes["outcome"].to_pylist()).items()):
        found[f"share {outcome}"] = count / total
    return numbers(found)
