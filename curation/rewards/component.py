"""Base of the reward's components: shapers, judges and reward models."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Component(BaseModel):
    """Fields of every component: a name, a weight, and bounds of its value."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")
    """Column name in tables and plots: lower case letters, digits and underscores; neither `solved` nor `valid`."""
    weight: float
    """Reward for a value of 1. 0 records the component without rewarding it."""
    clip_low: float | None = None
    """Lower values are raised to this bound; null: no bound."""
    clip_high: float | None = None
    """Higher values are lowered to this bound; null: no bound."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.clip_low is not None and self.clip_high is not None and self.clip_low > self.clip_high:
            raise ValueError(f"clip_low {self.clip_low} exceeds clip_high {self.clip_high}: swap them")
        return self

    def clip(self, value: float) -> float:
        """Clip a value to the component's bounds."""
        value = value if self.clip_low is None else max(self.clip_low, value)
        return value if self.clip_high is None else min(self.clip_high, value)
