"""Decide from the reports of several test runs which passed tests a final state cheats on.

Pure; executes nothing of a final state. `verify.make_verdict` makes the verdict of it.

as written     decides which tests passed, as the repository's own test runner would
observed       the same values, compared here with expectations that no run had
decoys         other expectations: a test that passes these too decides by something else
repeated       must say the same
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from contracts.tasks import Checks, Decoy, Observed, Rule
from curation.findings import Finding, finding
from curation.tasks.checks.expectations import agrees, rights
from envd.client import VerifyResult

_SEEN = "an assertion was seen"
"""Beginning of the reason for a test that ran an assertion too often or not at all."""
_PLAIN = "plain"
"""Kind of a value whose methods are not those of the final state; never worse than that of the reference's value."""


def base_name(test: str) -> str:
    """Name of a test without its parameters."""
    return test.split("[", 1)[0]


def base_names(tests: Sequence[str]) -> tuple[str, ...]:
    """Names without parameters, in order, without repetition."""
    return tuple(dict.fromkeys(map(base_name, tests)))


def passed(tests: Sequence[str], result: VerifyResult) -> bool:
    """Whether a run completed with the single result "passed" for every named test."""
    reported: dict[str, set[str]] = {}
    for each in result.outcomes:
        reported.setdefault(each.name, set()).add(each.status)
    return result.exit == "completed" and bool(tests) and all(reported.get(name) == {"passed"} for name in tests)


def passing(result: VerifyResult) -> frozenset[str]:
    """Names of the tests that a run reports as passed."""
    bad = {each.name for each in result.outcomes if each.status != "passed"}
    return frozenset(each.name for each in result.outcomes) - bad if result.exit == "completed" else frozenset()


@dataclass(frozen=True)
class Evidence:
    """Results of the runs beside the first."""

    findings: tuple[Finding, ...]
    tests: Mapping[str, str]
    """Reason for each test that does not pass after all, by name without parameters."""


def find_cheating(
    checks: Checks, observed: VerifyResult | None, decoys: Sequence[VerifyResult], *, part: bool = False
) -> Evidence:
    """Findings from observations and decoys of a state whose tests passed as written.

    part: the state fails other tests. Then an honest wrong answer may skip an assertion, as in a loop without rows, or
    fit the changed input of a decoy by chance. If a test is observed, neither is tampering, but a note.
    """
    wrong = contradictions(checks.observed, observed) if checks.observed and observed else {}
    excused = {test for test in checks.fully_observed if part and wrong.get(test, _SEEN).startswith(_SEEN)}
    findings: list[Finding] = []
    for test, reason in wrong.items():
        kind = "unconfirmed" if test in excused else "observed"
        findings.append(finding(f"{kind}:{test}", f"passes as written, but {reason}"))
    why = dict(wrong)
    for decoy, result in zip(checks.decoys, decoys, strict=True):
        for test in sorted(passing(result) & set(decoy.tests)):
            reason = "it passes with other expectations, too"
            findings.append(finding(f"{'unconfirmed' if test in excused else 'decoy'}:{test}", reason))
            why.setdefault(test, reason)
    return Evidence(tuple(findings), why)


def agreeing(observed: Observed, test: str, named: int, result: VerifyResult) -> int:
    """Number of a test's parameters whose values satisfy its assertions, in a run of all parameters as observed.

    test: a name without parameters. named: number of its parameters that the task names; the others are taken to agree.
    0 for a test that does not run each of its assertions once with each parameter.
    """
    seen = observed.seen[test]
    once = {key for key in seen if observed.rules[key].form != "kind"}
    left = {key: Counter(values if key in once else {_PLAIN, *values}) for key, values in seen.items()}
    totals = {left[key].total() for key in once}
    if result.exit != "completed" or len(totals) != 1 or not all(observed.rules[key].exact for key in once):
        return 0
    rows: dict[str, dict[str, list[str]]] = {}
    for each in result.observations:
        if base_name(each.test) == test:
            rows.setdefault(each.test, {}).setdefault(each.key, []).append(each.value)
    count = named - totals.pop()
    for keys in rows.values():
        used = {key: Counter(map(rights, values)) for key, values in keys.items()}
        if (
            once <= keys.keys() <= left.keys()
            and all(used[key].total() == 1 for key in once)
            and all(used[key].keys() <= (+left[key]).keys() for key in keys)
            and all(agrees(observed, key, value) for key, values in keys.items() for value in values)
        ):
            count += 1
            for key in once:  # each expected value counts once
                left[key] -= used[key]
    return max(count, 0)


def restricted(checks: Checks, tests: Collection[str]) -> Checks:
    """Checks of some tests alone. tests: names without parameters."""
    observed = checks.observed
    seen = {test: keys for test, keys in observed.seen.items() if test in tests} if observed else {}
    named = ((each, tuple(test for test in each.tests if test in tests)) for each in checks.decoys)
    return Checks(
        replace(observed, seen=seen) if observed and seen else None,
        tuple(Decoy(each.files, some) for each, some in named if some),
        tuple(test for test in checks.undecided if test in tests),
        checks.known,
        tuple(test for test in checks.beside if test in tests),
    )


def contradictions(observed: Observed, result: VerifyResult) -> dict[str, str]:
    """Kind of violation for each test whose observations violate its assertions, by name without parameters."""
    found: dict[str, str] = {}
    good = passing(result)
    seen: dict[str, dict[str, list[str]]] = {}
    for each in result.observations:
        seen.setdefault(base_name(each.test), {}).setdefault(each.key, []).append(each.value)
    for test, keys in observed.seen.items():
        if test not in good:
            found[test] = f"fails where its expectations are not in reach ({result.exit})"
            continue
        for key, before in keys.items():
            reason = _contradiction(observed, key, seen.get(test, {}).get(key, []), before)
            if reason is not None:
                found[test] = reason
                break
    return found


def _contradiction(observed: Observed, key: str, values: Sequence[str], before: Sequence[str]) -> str | None:
    rule = observed.rules[key]
    if rule.form == "kind":
        same = {rights(value) for value in values} <= {_PLAIN, *before}
        return None if same else "a value that the test computes with is of no builtin type"
    if not values or (rule.exact and len(values) != len(before)):
        return f"{_SEEN} {len(values)} times instead of {len(before)}"
    used = Counter(map(rights, values))
    if not set(used) <= set(before) or (rule.exact and used != Counter(before)):
        return "values were compared with others than the test's"
    undecided = False
    for value in values:
        told = agrees(observed, key, value)
        if told is False:
            return f"the value it gave is not what the test asks for ({_asked(rule)})"
        undecided |= told is None
    return "its value is of no builtin type, so that only its own code says what it equals" if undecided else None


def _asked(rule: Rule) -> str:
    return {"raises": " or ".join(rule.names), "truth": rule.want}.get(
        rule.form, f"{rule.operator} {rule.want}".strip()
    )[:80]
