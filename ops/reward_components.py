"""Metadata of each reward component for the asset page: numbers for plots and one table."""

from __future__ import annotations

from typing import Any

from contracts.artifacts import Artifact
from curation.rewards import RewardConfig
from curation.rewards.summary import component_summaries
from curation.rewards.tables import EVIDENCE_FILE
from ops.results import Metadata, markdown_table


def component_metadata(rewards: Artifact, config: RewardConfig) -> Metadata:
    """Unweighted mean, deviation and share of non-zero values of each component, and whether recomputation is
    identical.
    """
    evidence = rewards.table(EVIDENCE_FILE) if EVIDENCE_FILE in rewards.names() else None
    found = component_summaries(rewards.table("rewards.parquet"), evidence, config)
    numbers: dict[str, Any] = {}
    for each in found:
        values = {"mean": each.mean, "std": each.std, "nonzero": each.nonzero}
        numbers |= {f"component/{each.name}/{what}": value for what, value in values.items()}
        if each.missing:
            numbers[f"component/{each.name}/missing"] = each.missing
    said = {"recomputation": rewards.meta["recomputation"]} if "recomputation" in rewards.meta else {}
    return {**numbers, **said, "components": markdown_table([vars(each) for each in found])}
