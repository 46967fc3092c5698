"""What a benchmark returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from contracts.errors import TriplaneError


class Options(BaseModel):
    """Base of every benchmark's options: each field is a command-line option, its docstring the help."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


@dataclass(frozen=True)
class Result:
    """Metrics that goals may name, the rows behind them, and what a reader should know."""

    metrics: Mapping[str, float]
    rows: Sequence[Mapping[str, Any]] = ()
    """A table; equal keys in every row."""
    notes: Sequence[str] = field(default=())
    judged: bool = True
    """False: this run only shows that the benchmark works; goals are left alone."""


class NotHereError(TriplaneError):
    """This machine lacks what the benchmark measures."""
