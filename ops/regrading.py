"""Compare gradings of the same rollouts after a change of verifier or weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg
import pyarrow as pa

from contracts.artifacts import Artifact, ArtifactRef, list_artifacts, open_artifact
from contracts.store import Store
from curation.rewards import flips
from ops.ledger.rows import rule_of
from ops.results import SHORT
from ops.step import Step

MOST_SHOWN = 50
REWARD_FLIPS = pa.schema(
    [
        ("episode_id", pa.string()),
        ("task_id", pa.string()),
        ("from_reward", pa.float32()),
        ("to_reward", pa.float32()),
        ("from_reason", pa.string()),
        ("to_reason", pa.string()),
        ("from_version", pa.string()),
        ("to_version", pa.string()),
        ("checkpoints", pa.list_(pa.string())),
    ]
)
"""One row per episode whose reward or verdict differs between two gradings, by episode_id."""


def compare_gradings(step: Step) -> Artifact:
    """Make the `reward_flips` artifact: rewards against the previous ones of the same rollouts; empty if there are
    none.
    """
    found = step.work.find()
    if found is not None:
        return found
    refs = step.work.parents
    previous = refs.get("previous")
    rows = _flip_rows({role: open_artifact(step.store, ref) for role, ref in refs.items()}) if previous else []
    with step.work.writer() as out:
        out.add_table("flips.parquet", pa.Table.from_pylist(rows, schema=REWARD_FLIPS))
        trained = {digest for row in rows for digest in row["checkpoints"]}
        meta = {"flips": len(rows), "checkpoints": len(trained), "previous": previous.digest if previous else None}
        return out.commit(meta=meta)


def _flip_rows(parents: Mapping[str, Artifact]) -> list[dict[str, Any]]:
    old, new = parents["previous"], parents["rewards"]
    trained = _trained_on(parents)
    versions = {"from_version": rule_of(old.manifest), "to_version": rule_of(new.manifest)}
    return [
        {
            "episode_id": row["episode_id"],
            "task_id": row["task_id"],
            "from_reward": row["old_reward"],
            "to_reward": row["new_reward"],
            "from_reason": row["old_verdict"],
            "to_reason": ", ".join([row["new_verdict"] or "", *(row["new_findings"] or ())]),
            **versions,
            "checkpoints": trained.get(row["episode_id"], []),
        }
        for row in flips(old.table("rewards.parquet"), new.table("rewards.parquet")).to_pylist()
    ]


def _trained_on(parents: Mapping[str, Artifact]) -> dict[str, list[str]]:
    """Digests of the checkpoints that trained on each episode, by episode."""
    found: dict[str, list[str]] = {}
    for checkpoint in (each for each in parents.values() if each.ref.kind == "checkpoint"):
        dataset = next(each for each in parents.values() if each.ref == checkpoint.manifest.parents["dataset"])
        members = dataset.table("members.parquet", columns=["episode_id", "kept"]).to_pylist()
        for episode in (row["episode_id"] for row in members if row["kept"]):
            found.setdefault(episode, []).append(checkpoint.ref.digest)
    return {episode: sorted(digests) for episode, digests in found.items()}


def flips_table(table: pa.Table) -> dg.TableMetadataValue:
    """The first rows, for the asset page."""
    rows = table.slice(0, MOST_SHOWN).to_pylist()
    for row in rows:
        row["checkpoints"] = [digest[:SHORT] for digest in row["checkpoints"]]
    return dg.MetadataValue.table([dg.TableRecord({name: _cell(value) for name, value in row.items()}) for row in rows])


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
