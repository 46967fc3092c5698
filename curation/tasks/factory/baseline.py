"""Baseline of a repository: which tests pass whatever the order, hash seed, time zone, company and load.

Only such tests prove tasks. Failing and unstable ones are named with their cause.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contracts.store import Store
from curation.cheating import base_name
from curation.errors import TaskError
from curation.tasks.factory.functions import Lines
from curation.tasks.factory.guest import Guest, test_files
from curation.tasks.factory.source import Repository
from curation.tasks.factory.steps import recall, record, step_key

PASSING_SHARE = 0.8
"""Smallest share of passing tests with which a repository is used."""
_WALL_S, _CPU_S = 60.0, 6.0
"""Deadlines of one test. The first, of wall clock, is for tests that wait: a busy machine must not exceed it."""
_RUN_S = 900.0
_AT_ONCE = 2
"""Ways tried at once. Unlike candidates, which often only wait, all of them compute."""
_Run = tuple[str, dict[str, Any], dict[str, str]]
"""Name of a run, what it does, and its environment."""
_PLAIN, _TOGETHER, _AGAIN = "plain", "in another order, with another hash seed and time zone", "a second time"
_ALONE = "alone"
_FIRST: tuple[_Run, ...] = (
    (_PLAIN, {"coverage": True}, {"TZ": "UTC", "PYTHONHASHSEED": "0"}),
    (_ALONE, {"alone": True}, {"TZ": "UTC", "PYTHONHASHSEED": "0"}),
)
_RUNS: tuple[_Run, ...] = (
    ("under load", {"load": 1}, {"TZ": "UTC", "PYTHONHASHSEED": "0"}),
    (_TOGETHER, {"reverse": True}, {"TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "4711"}),
    (_AGAIN, {}, {"TZ": "UTC", "PYTHONHASHSEED": "0"}),
)
"""Runs without the tests that end their process, or never end, alone. The last repeats the plain one, without its
tracing.
"""
_DEADLY = ("endless", "kills")
_APART: tuple[_Run, ...] = (
    ("in another order", {"reverse": True}, {"TZ": "UTC", "PYTHONHASHSEED": "0"}),
    ("with another hash seed", {}, {"TZ": "UTC", "PYTHONHASHSEED": "4711"}),
    ("in another time zone", {}, {"TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "0"}),
)
"""The changes of _TOGETHER one by one, to name the one that a test fails in."""


@dataclass(frozen=True)
class TestFunction:
    """A test function with all its parameters."""

    __test__ = False
    name: str
    """Node id without parameters."""
    nodes: tuple[str, ...]
    """Its node ids."""
    path: str
    """File that defines it; empty if unknown."""
    line: int
    """Line of its definition or of its first decorator."""
    seconds: float
    """Duration of all its nodes in the first run, in seconds. In a suite, it decides only the timeout of slow tasks."""


@dataclass(frozen=True)
class Baseline:
    """Tests of a repository."""

    good: dict[str, TestFunction]
    """Tests that passed every run, by name."""
    bad: dict[str, str]
    """Cause for each other test or file, by name."""
    lines: Lines
    """Node ids of the tests that run each line of the product."""

    def functions_of(self, nodes: frozenset[str]) -> list[TestFunction]:
        """Good test functions with one of these nodes, by name."""
        names = {base_name(node) for node in nodes}
        return [self.good[name] for name in sorted(names) if name in self.good]


def check_tests(repository: Repository) -> None:
    """Raises TaskError if no file of the repository is one of tests."""
    if not test_files(repository.tree):
        raise TaskError(f"{repository.source} has no tests: files named test_*.py or *_test.py make tasks possible")


async def run_baseline(repository: Repository, guest: Guest, store: Store) -> Baseline:
    """Run all tests of a repository in every way, in sandboxes.

    Raises TaskError if pytest collects none, or if fewer than 80% of them pass always.
    """
    key = step_key("baseline", {"guest": guest.digest, "runs": [list(run) for run in (*_FIRST, *_RUNS, *_APART)]})
    found = recall(store, key)
    if found is None:
        found = record(store, key, _summary(await _run_all(guest)))
    baseline = Baseline(
        {row[0]: TestFunction(row[0], tuple(row[1]), *row[2:]) for row in found["good"]},
        found["bad"],
        Lines(found["lines"]),
    )
    _check(repository, baseline)
    return baseline


async def _run_all(guest: Guest) -> dict[str, dict[str, Any]]:
    """Results by run name."""
    slots, results = asyncio.Semaphore(_AT_ONCE), dict[str, dict[str, Any]]()

    async def run(runs: Sequence[_Run], without: Sequence[str] = ()) -> None:
        async def one(name: str, how: dict[str, Any], env: dict[str, str]) -> None:
            spec = {"runs": [{"name": "run", "without": without, **how}], "wall_s": _WALL_S, "cpu_s": _CPU_S}
            async with slots:
                results[name] = await guest.run(spec, timeout_s=_RUN_S, env=env)

        await asyncio.gather(*(one(*each) for each in runs))

    plain = asyncio.create_task(run(_FIRST[:1]))
    try:
        await run(_FIRST[1:])
        deadly = [node for node, outcome in _outcomes(results[_ALONE]).items() if outcome[0] in _DEADLY]
        await run(_RUNS, deadly)
        await plain
    finally:
        plain.cancel()
    if (_passing(results[_PLAIN]) & _passing(results[_AGAIN])) - _passing(results[_TOGETHER]):
        await run(_APART, deadly)
    return results


def _outcomes(result: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = result["runs"].get("run", {"outcomes": {}})["outcomes"]
    return found


def _passing(result: dict[str, Any]) -> set[str]:
    return {node for node, outcome in _outcomes(result).items() if outcome[0] == "passed"}


def _summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Good tests with their places and durations, causes of the bad ones, and the lines that tests run."""
    plain, outcomes = results[_PLAIN], {name: _outcomes(result) for name, result in results.items()}
    bad = {
        node: f"can't be imported: {message}"
        for result in results.values()
        for node, (outcome, message) in result["collect"].items()
        if outcome == "failed"
    }
    groups: dict[str, list[list[Any]]] = {}
    for row in plain["tests"]:
        groups.setdefault(base_name(row[0]), []).append(row)
    good = []
    for name, rows in groups.items():
        found = (_of_test(row[0], outcomes) for row in rows)
        causes = [cause for each in found if (cause := _cause(each))]
        if causes:
            bad[name] = causes[0]
        else:
            seconds = sum(outcomes[_PLAIN][row[0]][2] for row in rows)
            good.append([name, [row[0] for row in rows], rows[0][1], rows[0][2], round(seconds, 4)])
    late = {base_name(row[0]) for result in results.values() for row in result["tests"]} - groups.keys()
    bad.update(dict.fromkeys(late, "is not collected every time"))
    return {"good": good, "bad": bad, "lines": plain["runs"].get("run", {"lines": {}})["lines"]}


def _of_test(node: str, outcomes: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Outcome of a test in each run that it was part of; None if it was not collected."""
    found = {run: each.get(node) for run, each in outcomes.items()}
    alone = found[_ALONE]
    return found if alone is None or alone[0] not in _DEADLY else {run: found[run] for run in (_PLAIN, _ALONE)}


def _cause(outcomes: dict[str, Any]) -> str | None:
    """Why a test can't be used, by its outcomes in each run, or None."""
    statuses = {name: each[0] if each else "is not collected" for name, each in outcomes.items()}
    others = {name: status for name, status in statuses.items() if status != "passed"}
    if not others:
        return None
    message = next((each[1] for each in outcomes.values() if each and each[0] != "passed"), "")
    first = next(iter(others.values()))
    if set(statuses.values()) == {first}:
        return f"{first}: {message}" if message else first
    if _PLAIN not in others and _AGAIN not in others:
        apart = any(name in others for name, _, _ in _APART)
        places = [name for name in others if not (apart and name == _TOGETHER)]
        return f"unstable: {first} {' and '.join(places)}: {message}"
    return f"unstable: {len(statuses) - len(others)} of {len(statuses)} runs pass: {message}"


def _check(repository: Repository, baseline: Baseline) -> None:
    total = len(baseline.good) + len(baseline.bad)
    if total == 0:
        raise TaskError(f"{repository.source} has no test that pytest collects: see `pytest --collect-only` there")
    if len(baseline.good) < PASSING_SHARE * total:
        raise TaskError(
            f"only {len(baseline.good)} of {total} tests of {repository.source} pass every run, at least"
            f" {PASSING_SHARE:.0%} must: {common_causes(baseline.bad)}"
        )


def common_causes(bad: Mapping[str, str], most: int = 3) -> str:
    """The most frequent causes with their counts."""
    counts = Counter(" ".join(cause.split())[:120] for cause in bad.values())
    return "; ".join(
        f"{cause} ({count})" for cause, count in sorted(counts.items(), key=lambda x: (-x[1], x[0]))[:most]
    )
