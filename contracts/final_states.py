"""Final states of tasks by kind: what an episode leaves for grading, and what is expected of it.

    kind     bytes of the state (an episode's `final_diff`)         graded by
    diff     changes of the workspace, in git format                hidden tests
    answer   {"answer": value} as canonical JSON; empty: none       a rule on the value (curation/states/answer.py)
    database changes of an SQLite file, in git format               rows of queries (curation/states/database.py)
    requests recorded HTTP requests, as JSON; empty: none           expected requests (curation/states/requests.py)

The expected value is a part of the task, and no part of what its agent gets: files, instruction, prompt, template.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, TypeAdapter, model_validator

from contracts.artifacts import Frozen
from contracts.digests import canonical_json

MAX_ANSWER_CHARACTERS = 64 * 1024
"""Of a message that counts as an answer, and of the body of a request."""
MAX_HOSTS = 64
"""Most destinations in the rules of one sandbox."""
_THOUGHT_END = "</think>"


class DiffState(Frozen):
    """Changes of the workspace, which the task's hidden tests grade."""

    kind: Literal["diff"] = "diff"


class AnswerState(Frozen):
    """Answer of the agent: that of its last successful `submit_answer`, else the text of the turn that ended the
    episode.
    """

    kind: Literal["answer"] = "answer"
    rule: Literal["exact", "normalized", "json", "number"]
    """How an answer is compared: as text, byte for byte or without case and spacing; as a JSON value; as a number."""
    expected: JsonValue
    """The right answer."""
    absolute: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Largest accepted difference from the expected number."""
    relative: float = Field(default=0, ge=0, lt=1, allow_inf_nan=False)
    """The same as a fraction of the expected number. The larger of the two tolerances counts."""

    @model_validator(mode="after")
    def _fits_its_rule(self) -> AnswerState:
        text = self.rule in ("exact", "normalized")
        if text and not (isinstance(self.expected, str) and self.expected.strip()):
            raise ValueError(f"expected must be a text that is not blank under rule {self.rule}: quote it")
        number = isinstance(self.expected, int | float) and not isinstance(self.expected, bool)
        if self.rule == "number" and not number:
            raise ValueError("expected must be a number under rule number")
        if self.rule != "number" and (self.absolute or self.relative):
            raise ValueError(f"absolute and relative need rule number, and the rule is {self.rule}")
        if not all(map(math.isfinite, _floats(self.expected))):
            raise ValueError("expected must hold finite numbers only")
        return self


Cell = str | int | float | None
"""A value of a row, as SQLite gives it; a query turns blobs into text by hex()."""


class Query(Frozen):
    """A query and the rows that it must return."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")
    """Name of the check in verdicts."""
    sql: str = Field(min_length=1, max_length=10_000)
    """One statement that reads. It may have no parameters."""
    rows: tuple[tuple[Cell, ...], ...] = Field(max_length=1000)
    """Expected rows."""
    ordered: bool = False
    """Whether the order of the rows counts."""


class DatabaseState(Frozen):
    """SQLite file that the agent leaves in its workspace, with what it committed."""

    kind: Literal["database"] = "database"
    path: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]{0,199}$")
    """Path of the file in the workspace."""
    queries: tuple[Query, ...] = Field(min_length=1, max_length=100)

    @model_validator(mode="after")
    def _is_checkable(self) -> DatabaseState:
        if PurePosixPath(self.path).as_posix() != self.path or ".." in PurePosixPath(self.path).parts:
            raise ValueError(f"path {self.path!r} must be a plain path within the repository, such as data/app.db")
        _require_unique("query", [query.name for query in self.queries])
        cells = [cell for query in self.queries for row in query.rows for cell in row]
        if not all(math.isfinite(cell) for cell in cells if isinstance(cell, float)):
            raise ValueError("rows must hold finite numbers only")
        if not all(-(2**63) <= cell < 2**63 for cell in cells if isinstance(cell, int)):
            raise ValueError("rows must hold integers of 64 bits only")
        return self


class ExpectedRequest(Frozen):
    """Request that the agent must make, and that the destination must answer with a status from 200 to 399."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")
    """Name of the check in verdicts."""
    method: str = Field(pattern=r"^[A-Z]{1,20}$")
    host: str = Field(pattern=r"^[a-z0-9.-]{1,200}:[1-9][0-9]{0,4}$")
    """Name or IPv4 address, and port."""
    path: str = Field(default="/", pattern=r"^/[!-~]{0,2000}$")
    """Path with its query, as it is sent."""
    body: JsonValue = ""
    """A text is compared byte for byte, another value as JSON. At most 64 KiB."""
    count: int = Field(default=1, ge=0, le=1000)
    """How often it is made; 0: never."""

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.host.rpartition(":")
        return host, int(port)

    @property
    def text(self) -> str:
        """Body as text."""
        return self.body if isinstance(self.body, str) else canonical_json(self.body).decode()

    @model_validator(mode="after")
    def _can_be_made(self) -> ExpectedRequest:
        if self.address[1] > 65_535:
            raise ValueError(f"host {self.host} names no port: write name:port")
        if not all(map(math.isfinite, _floats(self.body))):
            raise ValueError(f"body of {self.name} must hold finite numbers only")
        if len(self.text.encode()) > MAX_ANSWER_CHARACTERS:
            raise ValueError(f"body of {self.name} takes more than {MAX_ANSWER_CHARACTERS} bytes")
        return self


class RequestsState(Frozen):
    """Plain HTTP requests that the agent makes through the proxy of its sandbox, which reaches their hosts only.

    Other requests may be made if their method changes nothing (GET, HEAD, OPTIONS).
    """

    kind: Literal["requests"] = "requests"
    requests: tuple[ExpectedRequest, ...] = Field(min_length=1, max_length=100)

    @model_validator(mode="after")
    def _is_work(self) -> RequestsState:
        _require_unique("request", [each.name for each in self.requests])
        if not any(each.count for each in self.requests):
            raise ValueError("every request has count 0, so nothing has to be done: expect one")
        if len({each.host for each in self.requests}) > MAX_HOSTS:
            raise ValueError(f"requests name more than {MAX_HOSTS} hosts, which a sandbox's rules can't allow")
        return self

    @property
    def rules(self) -> str:
        """Rules of the sandbox, as YAML: it reaches these hosts."""
        hosts = sorted({each.address for each in self.requests})
        return json.dumps({"network": {"allow": [{"host": host, "ports": [port]} for host, port in hosts]}})


FinalState = Annotated[DiffState | AnswerState | DatabaseState | RequestsState, Field(discriminator="kind")]
_ADAPTER: TypeAdapter[DiffState | AnswerState | DatabaseState | RequestsState] = TypeAdapter(FinalState)


def state_values(state: FinalState) -> dict[str, Any]:
    """What a final state declares, for JSON; empty for a diff."""
    values = state.model_dump(mode="json", exclude_defaults=True)
    return {"kind": state.kind, **values} if state.kind != "diff" else {}


def state_from(values: dict[str, Any]) -> FinalState:
    """Final state from `state_values`. Raises pydantic.ValidationError."""
    return _ADAPTER.validate_python(values or {"kind": "diff"})


def recording(state: FinalState) -> dict[str, Any]:
    """Options of `SandboxClient.create` for the sandbox of an agent whose task has this final state."""
    return {"rules": state.rules, "record_requests": True} if isinstance(state, RequestsState) else {}


def answer_bytes(value: JsonValue) -> bytes:
    """State of an episode with this answer."""
    return canonical_json({"answer": value})


def final_answer(submitted: Sequence[JsonValue], said: str) -> bytes:
    """State of an episode that submitted these answers and ended with this text; empty if there is no answer.

    Of the text, what follows a reasoning model's thoughts counts.
    """
    if submitted:
        return answer_bytes(submitted[-1])
    text = said.rpartition(_THOUGHT_END)[2].strip()
    return answer_bytes(text) if 0 < len(text) <= MAX_ANSWER_CHARACTERS else b""


def answer_in(state: bytes) -> tuple[JsonValue] | None:
    """The answer of a state, as a tuple of one; None if there is none."""
    try:
        found = json.loads(state)
    except (ValueError, RecursionError):
        return None
    return (found["answer"],) if isinstance(found, dict) and set(found) == {"answer"} else None


def _require_unique(what: str, names: Sequence[str]) -> None:
    """Raise ValueError with the first name that stands twice."""
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{what} {name} is declared twice")


def _floats(value: JsonValue) -> list[float]:
    if isinstance(value, float):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [found for each in inner for found in _floats(each)]
