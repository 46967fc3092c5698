"""Baseline of a repository: which tests pass whatever the order, hash seed, time zone, company and load.

Only such tests prove tasks. Failing and unstable ones are named with their cause.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
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
_RUNS: tuple[tuple[str, dict[str, Any], dict[str, str]], ...] = (
    ("plain", {"coverage": True}, {"TZ": "UTC", "PYTHONHASHSEED": "0"}),
    ("alone", {"alone": True}, {"TZ": "UTC", "PYTHONHASHSEED": "0"}),
    ("under load", {"load": 2}, {"TZ": "UTC", "PYTHONHASHSEED": "0"}),
    ("in another order", {"reverse": True}, {"TZ": "UTC", "PYTHONHASHSEED": "0"}),
    ("with another hash seed", {}, {"TZ": "UTC", "PYTHONHASHSEED": "4711"}),
    ("in another time zone", {}, {"TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "0"}),
    ("a second time", {}, {"TZ": "UTC", "PYTHONHASHSEED": "0"}),
)
"""Name of each run, what it does, and its environment, the longest first. The last repeats the first, without its
tracing.
"""


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
    """Duration of all its nodes together in the first run. Telemetry: nothing that a suite holds depends on it."""


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
    key = step_key("baseline", {"guest": guest.digest, "runs": [list(run) for run in _RUNS]})
    found = recall(store, key)
    if found is None:
        slots = asyncio.Semaphore(_AT_ONCE)
        results = await asyncio.gather(*(_run(guest, slots, *each) for each in _RUNS))
        found = record(store, key, _summary(results))
    baseline = Baseline(
        {row[0]: TestFunction(row[0], tuple(row[1]), *row[2:]) for row in found["good"]},
        found["bad"],
        Lines(found["lines"]),
    )
    _check(repository, baseline)
    return baseline


async def _run(
    guest: Guest, slots: asyncio.Semaphore, name: str, how: dict[str, Any], env: dict[str, str]
) -> dict[str, Any]:
    spec = {"runs": [{"name": "run", **how}], "wall_s": _WALL_S, "cpu_s": _CPU_S}
    async with slots:
        return await guest.run(spec, timeout_s=_RUN_S, env=env)


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Good tests with their places and durations, causes of the bad ones, and the lines that tests run."""
    runs = [result["runs"].get("run", {"outcomes": {}, "lines": {}}) for result in results]
    bad = {
        node: f"can't be imported: {message}"
        for result in results
        for node, (outcome, message) in result["collect"].items()
        if outcome == "failed"
    }
    groups: dict[str, list[list[Any]]] = {}
    for row in results[0]["tests"]:
        groups.setdefault(base_name(row[0]), []).append(row)
    good = []
    for name, rows in groups.items():
        causes = [cause for row in rows if (cause := _cause([run["outcomes"].get(row[0]) for run in runs]))]
        if causes:
            bad[name] = causes[0]
        else:
            seconds = sum(runs[0]["outcomes"][row[0]][2] for row in rows)
            good.append([name, [row[0] for row in rows], rows[0][1], rows[0][2], round(seconds, 4)])
    late = {base_name(row[0]) for result in results[1:] for row in result["tests"]} - groups.keys()
    bad.update(dict.fromkeys(late, "is not collected every time"))
    return {"good": good, "bad": bad, "lines": runs[0]["lines"]}


def _cause(outcomes: list[Any]) -> str | None:
    """Why a test can't be used, by its outcomes in the order of _RUNS, or None."""
    statuses = [each[0] if each else "is not collected" for each in outcomes]
    if all(status == "passed" for status in statuses):
        return None
    message = next((each[1] for each in outcomes if each and each[0] != "passed"), "")
    if len(set(statuses)) == 1:
        return f"{statuses[0]}: {message}" if message else statuses[0]
    if statuses[0] == "passed" == statuses[-1]:
        places = [name for (name, _, _), status in zip(_RUNS, statuses, strict=True) if status != "passed"]
        return f"unstable: {statuses[statuses.index(_other(statuses))]} {' and '.join(places)}: {message}"
    return f"unstable: {statuses.count('passed')} of {len(statuses)} runs pass: {message}"


def _other(statuses: list[str]) -> str:
    return next(status for status in statuses if status != "passed")


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
