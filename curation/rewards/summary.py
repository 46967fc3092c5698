"""Statistics of the reward components of an iteration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

import pyarrow as pa

from curation.rewards.config import RewardConfig


@dataclass(frozen=True)
class ComponentSummary:
    """Unweighted values of one component, over the episodes in which it has a value."""

    name: str
    kind: str
    weight: float
    mean: float
    std: float
    """Population deviation."""
    nonzero: float
    """Share of the values that are not 0."""
    missing: int
    """Scored episodes without a value of the component."""


def component_summaries(rewards: pa.Table, evidence: pa.Table | None, config: RewardConfig) -> list[ComponentSummary]:
    """Summaries of `solved`, `valid` and the configured components with values. evidence: None if none was stored."""
    found = []
    parts = [part for row in rewards["components"].to_pylist() for part in row]
    for name, weight in (("solved", config.solved), ("valid", config.valid)):
        values = [round(part["value"] / weight, 6) for part in parts if part["name"] == name] if weight else []
        found += _summary(name, "usual", weight, values)
    rows = evidence.select(["component", "value"]).to_pylist() if evidence is not None else []
    for component in config.components:
        rated = [row["value"] for row in rows if row["component"] == component.name]
        found += _summary(component.name, component.kind, component.weight, rated)
    return found


def _summary(name: str, kind: str, weight: float, rated: Sequence[float | None]) -> list[ComponentSummary]:
    values = [value for value in rated if value is not None and math.isfinite(value)]
    if not values:
        return []
    nonzero = sum(value != 0 for value in values) / len(values)
    return [ComponentSummary(name, kind, weight, fmean(values), pstdev(values), nonzero, len(rated) - len(values))]
