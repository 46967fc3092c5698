"""Grade the HTTP requests of an episode, as the sandbox server's proxy recorded them. Pure: no sandbox takes part."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import TypeAdapter, ValidationError

from contracts.artifacts import Frozen
from contracts.digests import canonical_json
from contracts.final_states import ExpectedRequest, RequestsState
from curation.states.answer import json_equal
from envd.client import TestOutcome, VerifyResult

OTHERS = "no_other_changes"
"""Name of the check that no other request changed anything."""
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing (RFC 9110, 9.2.1)."""


class _Made(Frozen):
    """One request of a record."""

    method: str
    host: str
    port: int
    path: str
    body: str
    whole: bool
    status: int


class _Record(Frozen):
    complete: bool
    requests: tuple[_Made, ...]


_RECORD = TypeAdapter(_Record)


def grade_requests(expected: RequestsState, state: bytes) -> VerifyResult:
    """Result of one check per expected request, and of OTHERS.

    state: `Sandbox.requests`; empty: no sandbox was started.
    """
    try:
        record = _RECORD.validate_json(state) if state else _Record(complete=True, requests=())
    except ValidationError:
        return _all_failed(expected, "the record is damaged")
    if not record.complete:
        return _all_failed(expected, "it made more requests than are recorded")
    if not any(_is_expected(expected, made) for made in record.requests):
        return _all_failed(expected, "no expected request was made")  # doing nothing earns no share of the checks
    outcomes = []
    for each in expected.requests:
        count = sum(_is_same(each, made) and (_succeeded(made) or not each.count) for made in record.requests)
        why = "" if count == each.count else f"made {count} times, expected {each.count}"
        outcomes.append(_failed(each.name, why) if why else TestOutcome(each.name, "passed"))
    others = [made for made in record.requests if _may_have_changed(made) and not _is_expected(expected, made)]
    outcomes.append(_failed(OTHERS, f"{len(others)} others") if others else TestOutcome(OTHERS, "passed"))
    return VerifyResult(tuple(outcomes), "completed", "")


def requests_state(requests: Sequence[ExpectedRequest], *, status: int = 200, repeat: int = 1) -> bytes:
    """State of an episode that made these requests, each `repeat` times as often as expected."""
    rows = [
        {
            "method": each.method,
            "host": each.address[0],
            "port": each.address[1],
            "path": each.path,
            "body": each.text,
            "whole": True,
            "status": status,
        }
        for each in requests
        for _ in range(each.count * repeat)
    ]
    return canonical_json({"complete": True, "requests": rows})


def requests_cheats(state: RequestsState) -> dict[str, bytes]:
    """Final states, by name, that try to pass without the work."""
    return {
        "no_requests": requests_state(()),
        "unanswered": requests_state(state.requests, status=0),
        "twice": requests_state(state.requests, repeat=2),
    }


def _is_expected(expected: RequestsState, made: _Made) -> bool:
    return _succeeded(made) and any(each.count and _is_same(each, made) for each in expected.requests)


def _succeeded(made: _Made) -> bool:
    """Whether a request was forwarded as a whole, and answered well."""
    return made.whole and 200 <= made.status < 400


def _may_have_changed(made: _Made) -> bool:
    """Whether a request may have changed something: it was not refused, and its method is not one that only reads."""
    return made.method not in _READING and not 400 <= made.status < 500


def _is_same(expected: ExpectedRequest, made: _Made) -> bool:
    if (made.method, made.host, made.port, made.path) != (expected.method, *expected.address, expected.path):
        return False
    if isinstance(expected.body, str):
        return made.body == expected.body
    try:
        return json_equal(json.loads(made.body), expected.body)
    except (ValueError, RecursionError):
        return False


def _all_failed(expected: RequestsState, why: str) -> VerifyResult:
    names = [*(each.name for each in expected.requests), OTHERS]
    return VerifyResult(tuple(_failed(name, why) for name in names), "completed", "")


def _failed(name: str, why: str) -> TestOutcome:
    return TestOutcome(name, "failed", why)
