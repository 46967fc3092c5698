"""Goals as data: `goals.yaml` gives the bound of each metric, and its reason."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from contracts.errors import ConfigError

GOALS = Path(__file__).parent / "goals.yaml"
COMPARISONS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}


class Goal(BaseModel):
    """Bound of one metric."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str
    metric: str
    comparison: Literal["<", "<=", ">", ">=", "=="]
    value: float
    unit: str
    why: str


class Verdict(BaseModel):
    """Result of a goal."""

    model_config = ConfigDict(frozen=True)
    goal: Goal
    measured: float | None
    """None if the benchmark did not report the metric, which counts as a miss."""
    met: bool


def load_goals(path: Path = GOALS) -> dict[str, list[Goal]]:
    """Goals by benchmark. Raises ConfigError with the first error."""
    try:
        return TypeAdapter(dict[str, list[Goal]]).validate_python(yaml.safe_load(path.read_text()))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {str(error).splitlines()[0]}") from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {place}={first['input']!r}: {first['msg']}") from None


def check_goals(goals: list[Goal], metrics: Mapping[str, float]) -> list[Verdict]:
    """One verdict per goal, in order. A metric that is absent or NaN misses its goal."""
    verdicts = []
    for goal in goals:
        measured = metrics.get(goal.metric)
        met = measured is not None and COMPARISONS[goal.comparison](measured, goal.value)
        verdicts.append(Verdict(goal=goal, measured=measured, met=met))
    return verdicts
