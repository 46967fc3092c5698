"""Generate docs/experiments.md from the pydantic models."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import BaseMetadata
from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

HEAD = """# Experiment files

One YAML file in `experiments/` is one experiment: its assets have the experiment's name as their prefix. This page is
written by `triplane experiments docs -o docs/experiments.md` from the models in the code;
`triplane experiments show -e NAME` prints an experiment with every default filled in, and `--set a.b=c` overrides a
value on the command line.

`extends: other.yaml` takes all values of a file beside it; sections are merged key by key, lists and sections of
another `kind` are replaced.

The key of a step's artifact depends on its inputs and its own part of this file: changing `trainer.*` does not repeat
sampling.
"""


def experiment_reference() -> str:
    """The whole page, in Markdown."""
    from resources.experiment import Experiment

    parts, places = [HEAD], dict[type[BaseModel], str]()
    for path, model in _sections("", Experiment, set()):
        parts.append(f"\n## {f'`{path}`' if path else 'Top level'}\n\n{_first_paragraph(model)}\n")
        if places.setdefault(model, path) != path:
            parts.append(f"\nThe settings are those of `{places[model]}` above.\n")
            continue
        parts.append("\n| key | type | default | meaning |\n|---|---|---|---|\n")
        texts = field_docstrings(model)
        parts += [_row(name, info, texts.get(name, "")) for name, info in model.model_fields.items()]
    return "".join(parts)


def field_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Docstring of each field of `model` and its bases, on one line."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= _own_docstrings(base)
    return found


def _own_docstrings(model: type[BaseModel]) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    found = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def _sections(
    path: str, model: type[BaseModel], described: set[type[BaseModel]]
) -> Iterator[tuple[str, type[BaseModel]]]:
    """Sections by path. Of a model that is described already, its own sections are left out."""
    yield path, model
    if model in described:
        return
    described.add(model)
    for name, info in model.model_fields.items():
        inner = list(_models(info.annotation))
        for each in inner:
            below = f"{path}.{name}" if path else name
            kind = each.model_fields.get("kind")
            tag = f" (kind: {get_args(kind.annotation)[0]})" if len(inner) > 1 and kind else ""
            yield from _sections(below + tag, each, described)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, types.UnionType, Annotated, tuple):
        for part in get_args(annotation):
            yield from _models(part)


def _row(name: str, info: FieldInfo, text: str) -> str:
    kind = _type_text(info.annotation) + "".join(f", {bound}" for bound in _bounds(info))
    cells = [f"`{name}`", kind, _default_text(info), text]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _type_text(annotation: Any) -> str:
    if list(_models(annotation)):
        return "list of sections" if get_origin(annotation) is tuple else "section"
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_type_text(part) for part in get_args(annotation))
    if annotation is type(None):
        return "null"
    if get_origin(annotation) is Annotated:
        return _type_text(get_args(annotation)[0])
    if get_origin(annotation) is dict:
        return "map of {} to {}".format(*map(_type_text, get_args(annotation)))
    if get_origin(annotation) is tuple:
        return f"list of {_type_text(get_args(annotation)[0])}"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", Any: "any", JsonValue: "any"}
    return names.get(annotation) or str(annotation).replace("typing.", "").removeprefix("<class '").removesuffix("'>")


def _bounds(info: FieldInfo) -> Iterator[str]:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤", "multiple_of": "multiple of", "min_length": "length ≥"}
    for bound in info.metadata:
        for attribute, sign in signs.items():
            if isinstance(bound, BaseMetadata) and getattr(bound, attribute, None) is not None:
                yield f"{sign} {getattr(bound, attribute)}"


def _default_text(info: FieldInfo) -> str:
    default = info.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "required"
    if isinstance(default, BaseModel):
        return "below"
    return f"`{json.dumps(default, default=str)}`"


def _first_paragraph(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())
