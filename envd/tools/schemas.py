"""Tools and toolsets: the one declaration that prompts, `Schemas`, MCP listings and argument checks follow.

A new tool is a `_spec` here, the toolsets that offer it, and the function that runs it (`envd.tools.files`,
`envd.server.toolrunner` for one that needs a sandbox, or a module of `envd.tools.connectors` for a connector).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from envd.errors import EnvdError

MAX_TIMEOUT_S = 86_400
"""Largest `timeout_s` that a call may name, in seconds: a day. The caller's own deadline is the smaller one."""
MAX_NESTING = 32
"""Deepest nesting of lists and objects in a call's arguments."""
_STRING = {"type": "string"}
_INTEGER = {"type": "integer"}
_BOOLEAN = {"type": "boolean"}
_TEXTS = {"type": "object", "additionalProperties": _STRING}
_WORDS = {
    "string": "a string",
    "integer": "an integer",
    "number": "a number",
    "array": "a list",
    "object": "an object",
    "boolean": "true or false",
    "null": "null",
}
_MAX_SHOWN = 200
"""Characters of a schema's value that an error shows."""


@dataclass(frozen=True)
class ToolSpec:
    """A tool as a model sees it. `parameters` is a JSON schema (draft 2020-12) of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any]

    def json_schema(self) -> dict[str, Any]:
        """The tool in the OpenAI function form that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def wrong(self, arguments: Mapping[str, Any]) -> str | None:
        """First thing in a call's arguments that the schema does not allow, in words, or None."""
        return next(self._faults(arguments), None)

    def _faults(self, arguments: Mapping[str, Any]) -> Iterator[str]:
        """Faults of missing arguments first, then by argument in alphabetical order."""
        yield from (f"missing argument: {key}" for key in self.parameters["required"] if key not in arguments)
        for key, value in sorted(arguments.items()):
            if key not in self.parameters["properties"]:
                yield f"unknown argument: {key}"
                continue
            for error in self._validators[key].iter_errors(value):
                yield f"{_place(key, error.absolute_path)} {_demand(str(error.validator), error.validator_value)}"
            if is_too_deep(value):
                yield f"{key} is nested more than {MAX_NESTING} levels deep"
            if isinstance(value, str) and "\0" in value:
                yield f"{key} holds a null character"

    @functools.cached_property
    def _validators(self) -> dict[str, Any]:
        """Validator of each argument."""
        # imported late: sandboxes run parts of this package with the standard library alone
        from jsonschema import Draft202012Validator
        from jsonschema.validators import extend

        types = Draft202012Validator.TYPE_CHECKER.redefine(  # 2.0 is no integer: it is no line number either
            "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
        )
        validator = extend(Draft202012Validator, type_checker=types)
        return {key: validator(schema) for key, schema in self.parameters["properties"].items()}


def _spec(name: str, description: str, required: list[str], **properties: Mapping[str, Any]) -> ToolSpec:
    schema = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return ToolSpec(name, description, schema)


def _within(least: int, most: int) -> Mapping[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


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
"""Tools of the default toolset that its prompt does not list."""
SUBMIT_ANSWER = "submit_answer"
_ANSWER = _spec(
    SUBMIT_ANSWER,
    "Submit the answer to the task: a text, a number, or any JSON value. The last answer counts.",
    ["answer"],
    answer={},
)
CONNECTORS: dict[str, ToolSpec] = {
    spec.name: spec
    for spec in (
        _spec(
            "sql",
            "Run one SQL statement on an SQLite file. Without `write` it may only read.",
            ["path", "query"],
            path=_STRING,
            query=_STRING,
            parameters={"type": "array", "items": {"type": ["string", "number", "null"]}, "maxItems": 100},
            rows=_within(1, 1000),
            write=_BOOLEAN,
        ),
        _spec(
            "http",
            "Send one HTTP request. Redirects are shown, not followed.",
            ["method", "url"],
            method={"enum": ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]},
            url=_STRING,
            headers=_TEXTS,
            body=_STRING,
        ),
        _spec(
            "browse",
            "Use a text browser without JavaScript. `open` needs `url` (or a file's path), `follow` the `number` of a"
            " link, `submit` the `number` of a form and its `fields` by name, `show` another first line as `number`.",
            ["action"],
            action={"enum": ["open", "follow", "submit", "show", "back"]},
            url=_STRING,
            number=_within(1, 99_999),
            fields=_TEXTS,
        ),
        _spec(
            "python",
            "Run Python code in an interpreter that keeps its variables between calls; shows what it prints and the"
            " last expression's value.",
            ["code"],
            code=_STRING,
            timeout_s=_within(1, 3600),
        ),
    )
}
"""Tools that a toolset offers where its name adds them: `files+sql` has those of `files` and `sql`."""
_BROWSING = {"open": "url", "follow": "number", "submit": "number"}
"""Argument that an action of `browse` needs."""
ALL_TOOLS: dict[str, ToolSpec] = TOOLS | EXTRA_TOOLS | {SUBMIT_ANSWER: _ANSWER} | CONNECTORS
"""Tools of all toolsets."""


@dataclass(frozen=True)
class Toolset:
    """Tools that a sandbox offers, by name."""

    name: str
    listed: Mapping[str, ToolSpec]
    """Tools that a prompt lists."""
    unlisted: Mapping[str, ToolSpec]
    """Tools that may be called too."""

    @property
    def tools(self) -> dict[str, ToolSpec]:
        """All tools of the set."""
        return {**self.listed, **self.unlisted}


def _toolset(name: str, *tools: str) -> Toolset:
    return Toolset(name, {each: ALL_TOOLS[each] for each in tools}, {})


DEFAULT_TOOLSET = "default"
TOOLSETS: dict[str, Toolset] = {
    each.name: each
    for each in (
        Toolset(DEFAULT_TOOLSET, TOOLS, EXTRA_TOOLS),
        _toolset("files", "read", "write", "edit", "list", "search"),
        _toolset("answer", *TOOLS, SUBMIT_ANSWER),
    )
}
"""Toolsets that tasks and sandboxes can name, alone or with connectors."""


@functools.lru_cache(maxsize=256)
def toolset_named(name: str) -> Toolset:
    """Toolset of this name, such as `files` or `files+sql+http`; empty: the default. Raises EnvdError."""
    base, *added = (name or DEFAULT_TOOLSET).split("+")
    if base not in TOOLSETS:
        raise EnvdError(f"no toolset {base[:40]!r}: use one of {', '.join(TOOLSETS)}")
    for each in added:
        if each not in CONNECTORS or added.count(each) > 1:
            raise EnvdError(f"toolset {name[:40]!r}: after +, name each of {', '.join(CONNECTORS)} at most once")
    found = TOOLSETS[base]
    return (
        Toolset(name, {**found.listed, **{each: CONNECTORS[each] for each in added}}, found.unlisted)
        if added
        else found
    )


def check_arguments(name: str, arguments: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a call, as the one line that the model is shown, or None."""
    if name not in ALL_TOOLS:
        return f"error: no such tool: {name}"
    wrong = ALL_TOOLS[name].wrong(arguments)
    if wrong is not None:
        return f"error: {name}: {wrong}"
    if name == "exec" and not abs(arguments.get("timeout_s", 0)) <= MAX_TIMEOUT_S:
        return f"error: exec: timeout_s must be at most {MAX_TIMEOUT_S}"
    if name == "browse" and (needed := _BROWSING.get(arguments["action"])) and needed not in arguments:
        return f"error: browse: {arguments['action']} needs {needed}"
    if name == "edit" and ("line" in arguments) == ("old" in arguments):
        return "error: edit: give either line or old"
    return None


def is_too_deep(value: Any, limit: int = MAX_NESTING) -> bool:
    """Whether lists and objects are nested more than `limit` levels deep in a JSON value."""
    level, deepest = [value], 0
    while level := [each for each in level if isinstance(each, (list, dict))]:
        deepest += 1
        if deepest > limit:
            return True
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return False


def _place(key: str, path: Iterable[Any]) -> str:
    """Name of a value in an argument, such as `rows[2].name`."""
    return key + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)


def _demand(keyword: str, wanted: Any) -> str:
    """What a schema's keyword demands, in words."""
    if keyword == "type":
        names = [wanted] if isinstance(wanted, str) else wanted
        return "must be " + " or ".join(_WORDS[each] for each in names)
    return f"must satisfy {keyword} {str(wanted)[:_MAX_SHOWN]}"
