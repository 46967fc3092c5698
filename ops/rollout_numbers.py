"""Statistics of an iteration's episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg
import pyarrow.compute as pc

from contracts.artifacts import Artifact
from ops.costs import sampling_costs
from ops.results import label, numbers
from ops.step import Step

SPEED = "tokens_per_second"


def rollout_numbers(rollouts: Artifact) -> dict[str, Any]:
    """Counts, means and costs of a `rollouts` or `evaluation_run` artifact."""
    episodes = rollouts.table("episodes.parquet", columns=["outcome", "turns", "policy_tokens", "format_errors"])
    telemetry = rollouts.table("telemetry.parquet")
    total = max(1, episodes.num_rows)
    found: dict[str, Any] = {**numbers(rollouts.meta), "episodes": episodes.num_rows}
    for column in ("turns", "policy_tokens", "format_errors"):
        found[f"{column} per episode"] = pc.mean(episodes[column]).as_py()
    for column in ("seconds", "sampling_seconds", "tool_seconds"):
        found[f"{column} per episode"] = pc.mean(telemetry[column]).as_py()
    found |= sampling_costs(rollouts)
    for outcome, count in sorted(Counter(episodes["outcome"].to_pylist()).items()):
        found[f"share {outcome}"] = count / total
    return numbers(found)


def sampled_numbers(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Number and speed of the episodes that this run sampled; shards may have run concurrently or in sequence.

    shards: results of `sample_shard`, one per shard with missing groups.
    """
    groups = sum(shard["groups"] - shard["found"] for shard in shards)
    tokens = sum(shard["tokens"] for shard in shards)
    found: dict[str, Any] = {"groups sampled by this run": groups}
    if tokens:
        seconds = max(shard["ended"] for shard in shards) - min(shard["began"] for shard in shards)
        found[SPEED] = tokens / max(seconds, 1e-6)
    return found


def speed_before(step: Step) -> dict[str, Any]:
    """Sampling speed of an earlier materialization of this partition, for the plot if a repetition samples nothing."""
    speed = sampling_speed(step.context.instance, step.experiment.name, step.iteration)
    return {} if speed is None else {SPEED: speed}


def sampling_speed(instance: dg.DagsterInstance, experiment: str, iteration: str) -> float | None:
    """Tokens sampled a second, as the page of an iteration's `rollouts` shows them; None if nothing was sampled."""
    wanted = dg.AssetRecordsFilter(dg.AssetKey([experiment, "rollouts"]), asset_partitions=[iteration])
    for record in instance.fetch_materializations(wanted, limit=1).records:
        made = record.asset_materialization
        value = made.metadata.get(label(SPEED)) if made else None
        if isinstance(value, dg.FloatMetadataValue):
            return value.value
    return None
