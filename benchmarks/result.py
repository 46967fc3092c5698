"""Result and options of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from contracts.errors import TriplaneError


class Options(BaseModel):
    """Base class of benchmark options: each field is a command-line option, with its docstring as help."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True)
class Result:
    """Metrics for goals, the rows with details, and notes for readers."""

    metrics: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]] = ()
    """Table rows with equal keys."""
    notes: Sequence[str] = field(default=())
    judged: bool = True
    """False: the run only tests the benchmark; goals are not judged."""


class NotHereError(TriplaneError):
    """This machine lacks what the benchmark measures."""
