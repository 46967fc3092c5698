"""Apply `--set a.b=c` to experiments, and explain validation errors."""

from __future__ import annotations

import copy
import difflib
import types
from collections.abc import Iterator
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, Discriminator, ValidationError
from pydantic.fields import FieldInfo

from contracts.yaml_text import load_yaml
from resources.errors import ExperimentError


def apply_overrides(values: dict[str, Any], overrides: list[str], model: type[BaseModel]) -> dict[str, Any]:
    """Copy of nested `values` of a `model` with each "a.b=c" applied; c is parsed as YAML.

    Another `kind` of a section whose fields depend on it drops the section's other values, which were meant for the
    former kind. Such overrides are applied first.

    Raises ExperimentError for an override without `=`.
    """
    result = copy.deepcopy(values)
    for override in sorted(overrides, key=lambda each: not each.partition("=")[0].strip().endswith(".kind")):
        path, equals, text = override.partition("=")
        if not equals or not path.strip():
            raise ExperimentError(f"override {override!r} is not field=value: write e.g. trainer.learning_rate=1e-4")
        *parents, last = path.strip().split(".")
        place, fields = result, [model]
        for parent in parents:
            fields = _fields(fields, parent)
            if place.get(parent) is None:
                place[parent] = {}
            place = place[parent]
            if not isinstance(place, dict):
                raise ExperimentError(f"override {override!r}: {parent} is {place!r}, which has no fields")
        value = _value(text, override)
        if last == "kind" and place.get(last, value) != value and any(map(_is_discriminated, fields)):
            place.clear()
        place[last] = value
    return result


def merge(base: dict[str, Any], changes: dict[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """Copy of nested `base`, values of a `model`, with those of `changes`, section by section; lists are replaced.

    Another `kind` of a section whose fields depend on it replaces the whole section.
    """
    return _merge(base, changes, [model])


def _merge(base: dict[str, Any], changes: dict[str, Any], places: list[Any]) -> dict[str, Any]:
    merged = copy.deepcopy(base)
    for name, value in changes.items():
        own, fields = merged.get(name), _fields(places, name)
        merged[name] = value
        if isinstance(own, dict) and isinstance(value, dict):
            same = value.get("kind", own.get("kind")) == own.get("kind")
            if same or not any(map(_is_discriminated, fields)):
                merged[name] = _merge(own, value, fields)
    return merged


def _fields(places: list[Any], name: str) -> list[Any]:
    """Fields `name` of the models at `places`, which are models or fields."""
    found = [model.model_fields.get(name) for place in places for model in _models(place)]
    return [field for field in found if field is not None]


def _value(text: str, override: str) -> Any:
    try:
        value = load_yaml(text)
    except ValueError as error:
        raise ExperimentError(f"override {override!r}: {text!r} is not a YAML value ({error}); quote it") from None
    if isinstance(value, str):
        try:
            return float(value)  # YAML 1.1 reads 1e-4 as a string
        except ValueError:
            return value
    return value


def explain(error: ValidationError, model: type[BaseModel], source: str) -> str:
    """One line per error: field, value, problem and, for an unknown key, the most similar known key. source: of the
    values, such as "experiment quickstart.yaml".
    """
    lines = []
    for fault in error.errors():
        path = _without_tags(model, fault["loc"])
        where = ".".join(str(part) for part in path)
        if fault["type"] == "extra_forbidden":
            lines.append(f"{where} is not a field: {_suggest(model, path)}")
            continue
        message = fault["msg"].removeprefix("Value error, ")
        lines.append(f"{where} = {_shown(where, fault['input'])}: {message}" if where else message)
    return f"{source}: " + "; ".join(lines)


def _shown(where: str, value: Any) -> str:
    """Value for an error message; hidden in fields where users put secrets by mistake."""
    secret = ".endpoint" in where and (where.endswith("api_key_env") or "@" in repr(value))
    return "(not shown)" if secret else f"{value!r:.60}"


def _without_tags(model: type[BaseModel], path: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Path of an error in the file, without the kind that pydantic inserts after every discriminated union."""
    kept: list[int | str] = []
    places: list[Any] = [model]
    tag_follows = False
    for part in path:
        if tag_follows:
            tag_follows = False
            continue
        kept.append(part)
        if isinstance(part, int):
            places = [item for each in places for item in get_args(getattr(each, "annotation", each))[:1]]
        else:
            places = _fields(places, part)
        tag_follows = any(_is_discriminated(each) for each in places)
    return tuple(kept)


def _is_discriminated(place: Any) -> bool:
    """Whether a field, or an item of a tuple, is a discriminated union, or null."""
    if isinstance(place, FieldInfo):
        if place.discriminator is not None or any(isinstance(each, Discriminator) for each in place.metadata):
            return True
        place = place.annotation
    if get_origin(place) in (Union, types.UnionType):
        return any(map(_is_discriminated, get_args(place)))
    return get_origin(place) is Annotated and any(
        isinstance(each, FieldInfo) and _is_discriminated(each) for each in get_args(place)[1:]
    )


def _suggest(model: type[BaseModel], path: tuple[int | str, ...]) -> str:
    models: list[type[BaseModel]] = [model]
    for part in path[:-1]:
        if isinstance(part, int):
            continue
        models = [
            found
            for each in models
            if str(part) in each.model_fields
            for found in _models(each.model_fields[str(part)])
        ]
    known = sorted({name for each in models for name in each.model_fields})
    if path[-1] in known:
        return "only another kind has this field; remove it"
    near = difflib.get_close_matches(str(path[-1]), known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, FieldInfo):
        annotation = annotation.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType, Annotated, tuple):
        for part in get_args(annotation):
            yield from _models(part)
