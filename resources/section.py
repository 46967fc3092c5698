"""Base class of an experiment's sections."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base class of an experiment's sections: immutable; unknown keys, NaN and infinity are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
