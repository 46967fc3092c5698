"""Selection of training tasks by difficulty, as an experiment states it."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DifficultyConfig(BaseModel):
    """Range of estimated pass rates (`triplane tasks difficulty`) that training tasks are drawn from. Other splits are
    used whole.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    low: float = Field(default=0.0, ge=0, le=1)
    """Smallest estimated pass rate of a training task."""
    high: float = Field(default=1.0, ge=0, le=1)
    """Largest estimated pass rate of a training task."""
    artifact: str | None = Field(default=None, pattern=r"^[0-9a-f]{8,64}$")
    """Digest of the difficulty artifact, or at least its first eight digits; null: the newest of the suite. Pinned when
    an iteration begins.
    """

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}: exchange them")
        return self

    def admits(self, rate: float | None) -> bool:
        """Whether a task of this estimated pass rate is drawn; None: never tried."""
        return rate is not None and self.low <= rate <= self.high

    def __str__(self) -> str:
        return f"[{self.low:g}, {self.high:g}]"
