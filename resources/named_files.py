"""YAML files that hold one named thing each: evaluations and data pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from pydantic import BaseModel, ValidationError

from contracts.errors import ConfigError
from contracts.yaml_text import load_yaml
from resources.overrides import explain

M = TypeVar("M", bound=BaseModel)


class _Named(Protocol):
    @property
    def name(self) -> str:
        """Name inside the file."""


def read_values(path: Path, what: str, hint: str) -> dict[str, Any]:
    """Values of a file. what: it holds, such as "evaluation". hint: how to make a missing one. Raises ConfigError."""
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        known = ", ".join(each.stem for each in sorted(path.parent.glob("*.yaml"))) or "(none)"
        raise ConfigError(f"{what} {path} can't be read ({error.strerror}): choose one of {known}, or {hint}") from None
    except ValueError as error:
        raise ConfigError(f"{what} {path} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{what} {path} is not a mapping: begin with `name: ...`")
    return values


def parse_named(values: dict[str, Any], model: type[M], path: Path, what: str) -> M:
    """Model of a file's values. Raises ConfigError that names the file, the field, the value and the fix."""
    try:
        found = model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, model, f"{what} {path}")) from None
    name = cast(_Named, found).name
    if name != path.stem:
        raise ConfigError(f"{what} {path} is called {name} inside: give the file that name, or change `name`")
    return found
