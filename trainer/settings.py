"""Base class of the trainer's settings."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Immutable; unknown keys are errors, as are NaN and infinity, which become null in the JSON of a job; a field's
    docstring is its description.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
