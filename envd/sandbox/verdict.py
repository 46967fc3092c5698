"""Compute outcomes from a runner's records: exact accounting of the named tests, and signs of tampering.

A test that did not report is missing, whatever the last record says. A test passes only if all its parametrizations ran
and passed, and nothing that its verdict depends on was tampered with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envd.sandbox.runner import base_name
from envd.types import Observation, TestOutcome, TestStatus, VerifyExit

Record = tuple[str, str, str, str, str]
"""Kind (test, collect, see, tamper, canary, end), name, phase, status, message. For `see`, the last four are the test,
the assertion's key, an empty string, and the values.
"""
_FINDING = re.compile(r"[\w.:-]{1,80}")
_MOST_FINDINGS = 32
_MOST_OBSERVATIONS = 20_000
_MOST_OBSERVED_BYTES = 8 << 20
_EVERYWHERE, _ASIDE = "", "\n"
_HARMLESS = ("spawned:", "read:", "frames:", "memory:", "code:", "internals:", "hooked:sys.addaudithook")
"""Prefixes of the audit hook's findings. They do not change outcomes: the caller, who knows the task, decides whether
they invalidate the verdict.
"""


@dataclass(frozen=True)
class Ending:
    """How a runner ended."""

    exit: VerifyExit
    as_agreed: bool
    """Whether the exit code was the one that only the runner and its supervisor know."""
    status: int = 0
    """Exit code; negative: number of the signal that killed the runner."""


def outcomes_and_tampering(
    tests: Sequence[str], records: Sequence[Record], ending: Ending
) -> tuple[tuple[TestOutcome, ...], tuple[str, ...]]:
    """Outcomes in the order of `tests`, and the names of all signs of tampering."""
    found = _findings(records, ending)
    answer = tuple(
        _unless_tampered(outcome, found) if outcome.status == "passed" else outcome
        for outcome in outcomes(tests, records)
    )
    names = sorted({name for each in found.values() for name in each})
    if ending.exit == "crashed" and (ending.as_agreed or ending.status == 0):
        names.append("exit-early")
    return answer, tuple(names[:_MOST_FINDINGS])


def outcomes(tests: Sequence[str], records: Sequence[Record]) -> tuple[TestOutcome, ...]:
    """Outcomes of the requested tests, computed from the records."""
    phases: dict[str, dict[str, tuple[str, str]]] = {}
    twice: set[str] = set()
    files: dict[str, tuple[str, str]] = {}
    for kind, name, phase, status, message in records:
        if kind == "collect":
            files[name] = (status, message)
        elif kind == "test":
            reported = phases.setdefault(name, {})
            if phase in reported:
                twice.add(name)
            reported[phase] = (status, message)
    answer = []
    for test in tests:
        members = [name for name in sorted(phases) if test in (name, base_name(name))]
        found = [_one_test(phases[name], name in twice) for name in members]
        status, message = _worst(found) if found else _not_run(test, files)
        answer.append(TestOutcome(test, status, message))
    return tuple(answer)


def observations(records: Sequence[Record]) -> tuple[Observation, ...]:
    """Observations of tests without expectations, in order, bounded in number and size."""
    seen: list[Observation] = []
    room = _MOST_OBSERVED_BYTES
    for kind, name, key, _, value in records:
        if kind == "see" and len(seen) < _MOST_OBSERVATIONS and room > 0:
            seen.append(Observation(name, key, value))
            room -= len(name) + len(key) + len(value)
    return tuple(seen)


def _findings(records: Sequence[Record], ending: Ending) -> dict[str, set[str]]:
    """Signs of tampering by the test that they affect; `_EVERYWHERE`: all tests; `_ASIDE`: none."""
    found: dict[str, set[str]] = {}
    seen: set[tuple[str, str]] = set()
    ended = False
    fates = []
    for kind, name, phase, status, _ in records:
        if ended:
            found.setdefault(_EVERYWHERE, set()).add("forged:report-after-the-end")
            break
        if kind == "test":
            if (name, phase) in seen:
                found.setdefault(name, set()).add("forged:report")
            seen.add((name, phase))
        elif kind == "tamper":
            known = status if _FINDING.fullmatch(status) else "forged:report"
            if sum(map(len, found.values())) < _MOST_FINDINGS:
                # a patch outlives the test that made it
                where = name if status == "always-equal" else _ASIDE if known.startswith(_HARMLESS) else _EVERYWHERE
                found.setdefault(where, set()).add(known)
        elif kind == "canary":
            fates.append(status)
        ended = ended or kind == "end"
    if any(fate != "failed" for fate in fates):
        found.setdefault(_EVERYWHERE, set()).add("rewritten:report")
    if ended and (not ending.as_agreed or len(fates) != 1) and ending.exit == "completed":
        found.setdefault(_EVERYWHERE, set()).add("forged:end")
    return found


def _unless_tampered(outcome: TestOutcome, found: Mapping[str, set[str]]) -> TestOutcome:
    names = {
        name
        for where, each in found.items()
        if where == _EVERYWHERE or outcome.name in (where, base_name(where))
        for name in each
    }
    return TestOutcome(outcome.name, "error", f"tampered: {', '.join(sorted(names))}") if names else outcome


def _one_test(reported: Mapping[str, tuple[str, str]], twice: bool) -> tuple[TestStatus, str]:
    if twice:
        return "error", "reported twice"
    for phase in ("setup", "call", "teardown"):
        if phase not in reported:
            return "missing", f"no report of its {phase}"
        status, message = reported[phase]
        if status == "skipped":
            return "skipped", message
        if status != "passed":
            return ("failed" if phase == "call" else "error"), message
    return "passed", ""


_SEVERITY: tuple[TestStatus, ...] = ("passed", "skipped", "missing", "error", "failed")


def _worst(found: Sequence[tuple[TestStatus, str]]) -> tuple[TestStatus, str]:
    return max(found, key=lambda outcome: _SEVERITY.index(outcome[0]))


def _not_run(test: str, files: Mapping[str, tuple[str, str]]) -> tuple[TestStatus, str]:
    for name, (status, message) in sorted(files.items()):
        if test == name or test.startswith(name + "::"):
            return ("skipped" if status == "skipped" else "error"), message
    return "missing", "not collected or never reported"


def all_missing(tests: Sequence[str]) -> tuple[TestOutcome, ...]:
    """Outcomes of a run that could not begin: every test is missing."""
    return tuple(TestOutcome(test, "missing", "not run") for test in tests)
