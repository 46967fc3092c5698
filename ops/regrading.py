"""Compare gradings of the same rollouts after a change of verifier or weights."""

from __future__ import annotations

from typing import Any

import dagster as dg

from contracts.artifacts import Artifact, ArtifactRef, list_artifacts
from contracts.store import Store
from curation.rewards import flips

MOST_SHOWN = 50


def earlier_gradings(store: Store, rewards: Artifact, rollouts: ArtifactRef) -> list[Artifact]:
    """Other `rewards` artifacts of the same rollouts, in order of their keys."""
    return [
        other
        for other in list_artifacts(store, "rewards")
        if other.ref.digest != rewards.ref.digest and other.manifest.parents["rollouts"].digest == rollouts.digest
    ]


def flip_metadata(store: Store, rewards: Artifact, rollouts: ArtifactRef) -> dict[str, Any]:
    """For each other grading of these rollouts, the number and rows of differing rewards and verdicts; empty if there
    is none.
    """
    found: dict[str, Any] = {}
    new = rewards.table("rewards.parquet")
    for other in earlier_gradings(store, rewards, rollouts):
        rows = flips(other.table("rewards.parquet"), new).to_pylist()
        lost = sum(row["old_solved"] is True and row["new_solved"] is False for row in rows)
        gained = sum(row["old_solved"] is False and row["new_solved"] is True for row in rows)
        records = [dg.TableRecord({name: _cell(value) for name, value in row.items()}) for row in rows[:MOST_SHOWN]]
        name = f"flips_against_{other.ref.short}"
        found[name] = len(rows)
        found[f"{name}_no_longer_solved"], found[f"{name}_newly_solved"] = lost, gained
        if records:
            found[f"{name}_rows"] = dg.MetadataValue.table(records)
    return found


def _cell(value: Any) -> str | float | bool:
    """Value for a table cell: Dagster's tables accept neither lists nor null."""
    if isinstance(value, (bool, float)):
        return value
    return "" if value is None else ", ".join(value) if isinstance(value, list) else str(value)
