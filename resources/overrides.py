"""Apply `--set a.b=c` to experiments, and explain validation errors."""

from __future__ import annotations

import copy
import difflib
import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from resources.errors import ExperimentError

_KINDS: dict[int | str, tuple[str, ...]] = {
    "base": ("sft", "import"),
    "engine": ("builtin", "openai"),
    "tasks": ("generated", "import"),
}


def apply_overrides(values: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """Copy of nested `values` with each "a.b=c" applied; c is parsed as YAML.

    Raises ExperimentError for one without `=`.
    """
    result = copy.deepcopy(values)
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path.strip():
            raise ExperimentError(
                f"override {override!r} is not field=value: write e.g. trainer.grpo.learning_rate=1e-4"
            )
        *parents, last = path.strip().split(".")
        place = result
        for parent in parents:
            if place.get(parent) is None:
                place[parent] = {}
            place = place[parent]
            if not isinstance(place, dict):
                raise ExperimentError(f"override {override!r}: {parent} is {place!r}, which has no fields")
        place[last] = _value(text, override)
    return result


def _value(text: str, override: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ExperimentError(f"override {override!r}: {text!r} is not a YAML value; quote it") from None
    if isinstance(value, str):
        try:
            return float(value)  # YAML 1.1 reads 1e-4 as a string
        except ValueError:
            return value
    return value


def explain(error: ValidationError, model: type[BaseModel], source: str) -> str:
    """One line for each fault: field, value, problem and, for an unknown key, the nearest known one."""
    lines = []
    for fault in error.errors():
        path = _without_tag(fault["loc"])
        where = ".".join(str(part) for part in path)
        if fault["type"] == "extra_forbidden":
            lines.append(f"{where} is not a field: {_suggest(model, path)}")
            continue
        message = fault["msg"].removeprefix("Value error, ")
        lines.append(f"{where} = {_shown(where, fault['input'])}: {message}" if where else message)
    return f"experiment {source}: " + "; ".join(lines)


def _shown(where: str, value: Any) -> str:
    """Value as an error shows it; hidden where people put secrets by mistake."""
    secret = ".endpoint" in where and (where.endswith("api_key_env") or "@" in repr(value))
    return "(not shown)" if secret else f"{value!r:.60}"


def _without_tag(path: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Path of a fault as in the file: pydantic inserts the chosen kind after `base`, `engine`, `tasks` and each
    component.
    """
    if path[:2] == ("rewards", "components") and len(path) > 3:
        return path[:3] + path[4:]
    tagged = len(path) > 1 and path[1] in _KINDS.get(path[0], ())
    return path[:1] + path[2:] if tagged else path


def _suggest(model: type[BaseModel], path: tuple[int | str, ...]) -> str:
    models: list[type[BaseModel]] = [model]
    for part in path[:-1]:
        if isinstance(part, int):
            continue
        models = [
            found
            for each in models
            if str(part) in each.model_fields
            for found in _models(each.model_fields[str(part)].annotation)
        ]
    known = sorted({name for each in models for name in each.model_fields})
    near = difflib.get_close_matches(str(path[-1]), known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType, Annotated, tuple):
        for part in get_args(annotation):
            yield from _models(part)
