"""Tool names, descriptions and argument schemas: the one definition that prompts, grammars and checks read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_TIMEOUT_S = 86_400
"""Largest `timeout_s` that a call may name, in seconds: a day. The caller's own deadline is the smaller one."""
_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "string": ((str,), "a string"),
    "integer": ((int,), "an integer"),
    "number": ((int, float), "a number"),
}


@dataclass(frozen=True)
class ToolSpec:
    """A tool as a model sees it. `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def json_schema(self) -> dict[str, Any]:
        """The tool in the OpenAI function form that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


def _spec(name: str, description: str, required: list[str], **properties: Mapping[str, Any]) -> ToolSpec:
    schema = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return ToolSpec(name, description, schema)


TOOLS: dict[str, ToolSpec] = {
    spec.name: spec
    for spec in (
        _spec("read", "Show a file's numbered lines.", ["path"], path=_STRING, start=_INTEGER, end=_INTEGER),
        _spec("write", "Create or overwrite a file.", ["path", "content"], path=_STRING, content=_STRING),
        _spec(
            "edit",
            "Replace line number `line`, or the only occurrence of `old`, by `new`.",
            ["path", "new"],
            path=_STRING,
            line=_INTEGER,
            old=_STRING,
            new=_STRING,
        ),
        _spec("list", "List files and directories.", [], path=_STRING, depth=_INTEGER),
        _spec(
            "search",
            "Find lines that match a regular expression.",
            ["pattern"],
            pattern=_STRING,
            path=_STRING,
        ),
        _spec(
            "exec",
            "Run a command in the sandbox's shell, which keeps its state between calls.",
            ["command"],
            command=_STRING,
            timeout_s={"type": "number"},
        ),
    )
}

EXTRA_TOOLS: dict[str, ToolSpec] = {
    spec.name: spec
    for spec in (
        _spec("lint", "Check files for mistakes without running them.", [], path=_STRING),
        _spec(
            "semantic_search",
            "Find the pieces of code that are nearest to a question in words.",
            ["query"],
            query=_STRING,
            path=_STRING,
            limit=_INTEGER,
        ),
    )
}
"""Tools that a sandbox has too, and that prompts name only where they are asked to."""
ALL_TOOLS: dict[str, ToolSpec] = TOOLS | EXTRA_TOOLS


def check_arguments(name: str, arguments: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a call, as the one line that the model is shown, or None."""
    if name not in ALL_TOOLS:
        return f"error: no such tool: {name}"
    schema = ALL_TOOLS[name].parameters
    for key in schema["required"]:
        if key not in arguments:
            return f"error: {name}: missing argument: {key}"
    for key, value in sorted(arguments.items()):
        if key not in schema["properties"]:
            return f"error: {name}: unknown argument: {key}"
        accepted, words = _TYPES[schema["properties"][key]["type"]]
        if not isinstance(value, accepted) or isinstance(value, bool):
            return f"error: {name}: {key} must be {words}"
        if isinstance(value, str) and "\0" in value:
            return f"error: {name}: {key} holds a null character"
    if name == "exec" and not abs(arguments.get("timeout_s", 0)) <= MAX_TIMEOUT_S:
        return f"error: exec: timeout_s must be at most {MAX_TIMEOUT_S}"
    if name == "edit" and ("line" in arguments) == ("old" in arguments):
        return "error: edit: give either line or old"
    return None
