"""Rules over the recorded tool calls of an episode. Pure functions that return a value in [0, 1] and its reason.

A rule measures the behaviour in its name: give a bad habit a negative weight. A rule about edits is 0 without edits, so
that inactivity earns nothing.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from contracts.tasks import Task
from envd.tools import relative

_RUNNER = re.compile(
    r"(?:^|[;&|(]\s*|\n\s*)(?:\w+=\S*\s+)*(?:\S*/)?(?:pytest|python[\d.]*\s+-m\s+(?:pytest|unittest))\b"
)
"""pytest or unittest at the beginning of a shell command."""


@dataclass(frozen=True)
class Call:
    """One executed tool call."""

    turn: int
    name: str
    arguments: Mapping[str, Any]
    ok: bool

    @property
    def edits(self) -> bool:
        """Whether the call changed a file."""
        return self.ok and self.name in ("edit", "write")

    @property
    def path(self) -> str:
        """Path that the call names, from the workspace's root, as the tools understand it."""
        path = relative(str(self.arguments.get("path", ".")))
        return posixpath.normpath(f"/{path}")[1:] or "."

    @property
    def runs_tests(self) -> bool:
        """Whether the call started a test runner."""
        return self.name == "exec" and bool(_RUNNER.search(str(self.arguments.get("command", ""))))


@dataclass(frozen=True)
class Rating:
    """Value of one component for one episode; None if it can't be computed."""

    value: float | None
    reason: str
    answers: tuple[str, ...] = ()


Rule = Callable[[Sequence[Call], Task], Rating]


def read_before_edit(calls: Sequence[Call], task: Task) -> Rating:
    """Share of the successful edits whose file the agent had read or written before, or which did not exist."""
    known: set[str] = set()
    edits = seen = 0
    for call in calls:
        if call.edits:
            edits += 1
            seen += call.path in known or call.path not in task.files
        if call.ok and call.name in ("read", "edit", "write"):
            known.add(call.path)
    return Rating(seen / edits if edits else 0.0, f"{seen} of {edits} edits were of files read before")


def repeated_calls(calls: Sequence[Call], task: Task) -> Rating:
    """Share of the calls that repeat an earlier one with equal arguments, without a change or command in between."""
    asked: set[str] = set()
    repeated = 0
    for call in calls:
        form = json.dumps([call.name, call.arguments], sort_keys=True)
        repeated += form in asked
        if call.edits or (call.name == "exec" and form not in asked):
            asked.clear()
        asked.add(form)
    return Rating(repeated / len(calls) if calls else 0.0, f"{repeated} of {len(calls)} calls repeated an earlier one")


def failed_calls(calls: Sequence[Call], task: Task) -> Rating:
    """Share of the calls that failed: unknown tools, wrong arguments, edits without a match, commands that exit with an
    error.
    """
    failed = sum(not call.ok for call in calls)
    return Rating(failed / len(calls) if calls else 0.0, f"{failed} of {len(calls)} calls failed")


def edits_tests(calls: Sequence[Call], task: Task) -> Rating:
    """1 if a successful edit changed tests: test_*.py, *_test.py, conftest.py, or a file in a folder test or tests."""
    touched = sorted({call.path for call in calls if call.edits and _is_test(call.path)})
    return Rating(float(bool(touched)), f"changed {', '.join(touched)}" if touched else "changed no test")


def ran_tests(calls: Sequence[Call], task: Task) -> Rating:
    """1 if a command started pytest or unittest, whatever its result."""
    runs = sum(call.runs_tests for call in calls)
    return Rating(float(runs > 0), f"started tests {runs} times")


def tested_last_edit(calls: Sequence[Call], task: Task) -> Rating:
    """1 if pytest or unittest was started after the last successful edit."""
    last = max((index for index, call in enumerate(calls) if call.edits), default=None)
    if last is None:
        return Rating(0.0, "no edit took")
    tested = any(call.runs_tests for call in calls[last + 1 :])
    return Rating(float(tested), f"the last edit was {'tested' if tested else 'never tested'}")


RuleName = Literal["read_before_edit", "repeated_calls", "failed_calls", "edits_tests", "ran_tests", "tested_last_edit"]
"""The keys of RULES, as a type that experiments are checked against."""
RULES: dict[RuleName, Rule] = {
    "read_before_edit": read_before_edit,
    "repeated_calls": repeated_calls,
    "failed_calls": failed_calls,
    "edits_tests": edits_tests,
    "ran_tests": ran_tests,
    "tested_last_edit": tested_last_edit,
}


def rule_table() -> list[dict[str, str]]:
    """Names and descriptions of the rules, for display."""
    return [{"rule": name, "counts": " ".join((rule.__doc__ or "").split())} for name, rule in RULES.items()]


def read_calls(records: Sequence[Mapping[str, Any]]) -> list[Call]:
    """Calls of an EPISODES row."""
    return [_call(record) for record in records]


def _call(record: Mapping[str, Any]) -> Call:
    try:
        arguments = json.loads(record["arguments"])
    except ValueError:
        arguments = None
    return Call(record["turn"], record["name"], arguments if isinstance(arguments, dict) else {}, record["ok"])


def _is_test(path: str) -> bool:
    parts = PurePosixPath(path)
    folders = {"test", "tests"} & set(parts.parts[:-1])
    name = parts.name
    return (
        bool(folders) or name == "conftest.py" or (name.endswith(".py") and bool(re.match(r"test_|.*_test\.py$", name)))
    )
