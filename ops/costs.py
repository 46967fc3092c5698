"""Costs of one iteration, from telemetry. Not deterministic, so they enter no digest."""

from __future__ import annotations

from typing import Any

import duckdb
import pyarrow.compute as pc

from contracts.artifacts import Artifact
from ops.training import training_numbers

Costs = dict[str, Any]
"""Name -> sum over an iteration; `tokens_lost` is a mapping from reason to tokens."""
_LOST = """
SELECT m.reason, sum(coalesce(t.engine_tokens, 0))::BIGINT FROM members m JOIN telemetry t USING (episode_id)
WHERE NOT m.kept GROUP BY m.reason ORDER BY m.reason
"""


def sampling_costs(rollouts: Artifact) -> Costs:
    """Sums over episodes, which run many at once; an episode holds one sandbox for all its seconds."""
    table = rollouts.table("telemetry.parquet", ["engine_tokens", "sampling_seconds", "tool_seconds", "seconds"])
    names = {"engine_tokens": "engine_tokens", "engine_seconds": "sampling_seconds", "tool_seconds": "tool_seconds"}
    return {
        name: pc.sum(table[column]).as_py() or 0 for name, column in {**names, "sandbox_seconds": "seconds"}.items()
    }


def tokens_lost(rollouts: Artifact, dataset: Artifact) -> dict[str, int]:
    """Tokens that the engine computed for episodes that do not train, by the reason that left them out."""
    with duckdb.connect() as db:
        db.register("members", dataset.table("members.parquet", ["episode_id", "kept", "reason"]))
        db.register("telemetry", rollouts.table("telemetry.parquet", ["episode_id", "engine_tokens"]))
        return dict(db.sql(_LOST).fetchall())


def training_costs(checkpoint: Artifact, gpus: int | None) -> Costs:
    """Tokens and seconds of the training that made a checkpoint."""
    found = training_numbers(checkpoint)
    costs = {name: found.get(name, 0) for name in ("trained_tokens", "training_seconds")}
    return costs | ({} if gpus is None else {"gpu_seconds": costs["training_seconds"] * gpus})


def iteration_costs(
    rollouts: Artifact | None, dataset: Artifact | None, checkpoint: Artifact | None, *, gpus: int | None
) -> Costs:
    """All costs of an iteration, as far as its artifacts exist. gpus: that the trainer uses, if known."""
    found: Costs = {}
    if rollouts is not None and "telemetry.parquet" in rollouts.names():
        found |= sampling_costs(rollouts)
        if dataset is not None:
            found["tokens_lost"] = tokens_lost(rollouts, dataset)
    return found | (training_costs(checkpoint, gpus) if checkpoint else {})
