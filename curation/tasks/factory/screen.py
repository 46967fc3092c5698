"""Screen candidates in sandboxes: tests are collected once, and each candidate runs those that cover it in a fork."""

from __future__ import annotations

import asyncio
import math
import os
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contracts.store import Store
from curation.cheating import base_name
from curation.tasks.factory.baseline import Baseline
from curation.tasks.factory.functions import Function
from curation.tasks.factory.guest import Guest
from curation.tasks.factory.steps import recall, record, step_key
from curation.tasks.factory.strategies import Candidate, Edit, changed_text, normalized

MOST_TESTS = 250
"""A candidate whose lines more tests run is left out: it would break most of the suite."""
CHUNK = 250
"""Most candidates screened in one sandbox, and lost if it is killed."""
_AT_LEAST = min(4, os.cpu_count() or 1)
"""Least number of sandboxes that a screen uses, if it has as many candidates: starting one, and collecting its tests,
takes as long as 50 candidates.
"""
_WORKERS = 3
"""Forks at once in a sandbox: what only waits is known to do so after a second."""
_SCREEN_S = 3000.0
"""Deadline of a chunk, in seconds; envd allows 3600."""
_WALL_S, _CPU_S = 90.0, 2.0
"""Deadlines of one candidate. The first, of wall clock, is for code that waits: a busy machine must not exceed it. The
second bounds processor time: endless loops use all of it, and tests that need more would make every verdict slow.
"""
EMPTIED, NAMESAKE = "emptied", "namesake"
"""Strategies of substitutes, which make no task: a function without a body, and one of the same name from elsewhere."""
_ENVIRONMENT = {"TZ": "UTC", "PYTHONHASHSEED": "0"}


@dataclass(frozen=True)
class Screened:
    """A candidate that tests notice."""

    candidate: Candidate
    failed: dict[str, str]
    """Message of the first failing node of each failing test function, by the function's name."""
    covering: tuple[str, ...]
    """All test functions that run its lines, by name."""
    files: dict[str, int]
    """Number of failing nodes by test file."""
    file: str = ""
    """The test file that grades the task, once it is chosen (`choose.Graders`)."""


@dataclass(frozen=True)
class Substitute:
    """Another function in the place of one, and the tests that notice it."""

    candidate: Candidate
    """Of strategy EMPTIED or NAMESAKE."""
    failed: frozenset[str] = frozenset()
    """Test functions, by name, that are known to fail, or to run for ever."""
    ended: bool = False
    """Whether they all ran, so that the others pass."""


@dataclass(frozen=True)
class Screening:
    """Result of a screen."""

    kept: list[Screened]
    reasons: dict[str, int]
    """Number of candidates left out, by reason."""
    substitutes: list[Substitute]
    """Those asked for, in their order."""


async def screen(
    candidates: Sequence[Candidate],
    functions: Mapping[str, Function],
    baseline: Baseline,
    guest: Guest,
    store: Store,
    progress: Callable[[int, int], None] | None = None,
    substitutes: Sequence[Candidate] = (),
) -> Screening:
    """Candidates that make covering tests fail, in their order, and which tests notice the substitutes. Results are
    cached in chunks.
    """
    reasons: Counter[str] = Counter()
    judged = {each.identity: Substitute(each) for each in substitutes}
    asked: list[tuple[Candidate, dict[str, Any]]] = []
    for each in (*candidates, *substitutes):
        request = _request(each, functions, baseline)
        if isinstance(request, str):
            reasons[request] += each.identity not in judged
        else:
            asked.append((each, request))
    count = max(min(_AT_LEAST, len(asked)), math.ceil(len(asked) / CHUNK))
    # round-robin: the edits of a function are adjacent, and often many of them are endless
    chunks = [asked[start::count] for start in range(count)]
    done = 0

    async def one(chunk: list[tuple[Candidate, dict[str, Any]]]) -> dict[str, Any]:
        nonlocal done
        found = await _chunk([request for _, request in chunk], guest, store)
        done += len(chunk)
        if progress is not None:
            progress(done, len(asked))
        return found

    results = await asyncio.gather(*map(one, chunks))
    kept = list[Screened]()
    for chunk, result in zip(chunks, results, strict=True):
        for candidate, request in chunk:
            if candidate.identity in judged:
                judged[candidate.identity] = _judge_substitute(candidate, request, result.get(candidate.identity))
                continue
            verdict = _judge(candidate, request, result.get(candidate.identity), baseline)
            if isinstance(verdict, str):
                reasons[verdict] += 1
            else:
                kept.append(verdict)
    return Screening(kept, dict(sorted(reasons.items())), list(judged.values()))


def emptied_function(function: Function) -> Candidate:
    """A function that only returns None."""
    path, (start, end) = function.source.path, function.body_span
    return Candidate(EMPTIED, EMPTIED, function.key, (Edit(path, start, end, "return None"),))


def replaced_function(function: Function, text: str) -> Candidate | None:
    """A function replaced by another one, whose text has no decorators; None if that gives no function."""
    source, node = function.source, function.node
    changed = textwrap.indent(textwrap.dedent(text), " " * node.col_offset)
    edit = Edit(source.path, source.starts[node.lineno - 1], source.starts[function.last] - 1, changed)
    if normalized(changed_text(function, [edit])) is None:
        return None
    return Candidate(NAMESAKE, NAMESAKE, function.key, (edit,))


async def _chunk(requests: list[dict[str, Any]], guest: Guest, store: Store) -> dict[str, Any]:
    key = step_key("screen", {"guest": guest.digest, "requests": requests})
    found = recall(store, key)
    if found is None:
        spec = {"candidates": requests, "wall_s": _WALL_S, "cpu_s": _CPU_S, "workers": _WORKERS}
        found = record(store, key, (await guest.run(spec, timeout_s=_SCREEN_S, env=_ENVIRONMENT))["candidates"])
    result: dict[str, Any] = found
    return result


def _request(candidate: Candidate, functions: Mapping[str, Function], baseline: Baseline) -> dict[str, Any] | str:
    """Request of the program `inside`, or the reason why the candidate can't be screened."""
    function = functions[candidate.function]
    if {edit.path for edit in candidate.edits} != {candidate.path}:
        return "changes other files than its function's"
    tests = baseline.functions_of(_covering(candidate, functions, baseline))
    nodes = [node for test in tests for node in test.nodes]
    if not nodes:
        return "no stable test runs it"
    if len(nodes) > MOST_TESTS:
        return f"more than {MOST_TESTS} tests run it"
    body = function.source.offset(function.node.body[0].lineno, 0)
    hot = (
        all(body <= edit.start and edit.path == candidate.path for edit in candidate.edits)
        and all(edit.end <= function.source.starts[function.last] for edit in candidate.edits)
        and not baseline.lines.imported(function)
    )
    new = changed_text(function, candidate.edits)
    return {
        "id": candidate.identity,
        "hot": hot,
        "path": candidate.path,
        "qualname": function.qualname,
        "first": function.first,
        "line": function.node.lineno,
        "new_end": function.first + new.count("\n"),
        "edits": [[edit.path, edit.start, edit.end, edit.text] for edit in candidate.edits],
        "tests": sorted(nodes),
        "wall_s": _WALL_S,
        "cpu_s": _CPU_S,
    }


def _covering(candidate: Candidate, functions: Mapping[str, Function], baseline: Baseline) -> frozenset[str]:
    """Node ids of the tests that run a changed line, or the function if coverage knows no such line; of all that run
    the file for changes outside of functions.
    """
    found = frozenset[str]()
    for edit in candidate.edits:
        function = next((each for each in functions.values() if each.encloses(edit.path, *edit.span)), None)
        if function is None:
            found |= baseline.lines.of_file(edit.path)
            continue
        first, last = (function.source.data[:place].count(b"\n") + 1 for place in (edit.start, edit.end))
        start = function.node.body[0].lineno
        lines = baseline.lines.tests(edit.path, max(first, start), last) if first >= start else frozenset[str]()
        found |= lines or baseline.lines.tests(edit.path, start, function.last)
    return found


def _judge(candidate: Candidate, request: dict[str, Any], result: Any, baseline: Baseline) -> Screened | str:
    if result is None:
        return "lost"
    ended, problem, _, failed = result
    if ended in ("wall", "cpu", "waiting"):
        return "endless"
    if problem:
        return f"not run: {problem.split(':')[0]}"
    if ended != "exit":
        return "ends its process"
    if not failed:
        return "no test notices it"
    messages: dict[str, str] = {}
    for node in sorted(failed):
        messages.setdefault(base_name(node), failed[node][1])
    covering = tuple(sorted({base_name(node) for node in request["tests"]}))
    return Screened(candidate, messages, covering, dict(Counter(map(file_of, sorted(failed)))))


def _judge_substitute(candidate: Candidate, request: dict[str, Any], result: Any) -> Substitute:
    if result is None or result[1]:
        return Substitute(candidate)
    ended, _, ran, failed = result
    names = {base_name(node) for node in failed}
    if ended == "exit":
        return Substitute(candidate, frozenset(names), ended=True)
    # uncollected tests are reported first; the test after the last report ran until it was killed
    missing = [node for node in request["tests"] if failed.get(node, ("",))[0] == "missing"]
    order = [*missing, *(node for node in request["tests"] if node not in missing)]
    if ended in ("wall", "cpu", "waiting") and ran < len(order):
        names.add(base_name(order[ran]))
    return Substitute(candidate, frozenset(names))


def file_of(test: str) -> str:
    """Test file of a test."""
    return test.split("::", 1)[0]
