"""Verdicts on final states: what they say, their keys in the store, and how the reports of runs become one."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from contracts.artifacts import Frozen
from contracts.digests import digest_of, sha256
from contracts.errors import ArtifactCorrupt, ArtifactMissing
from contracts.store import Store
from contracts.tasks import Checks, Task
from curation.cheating import Evidence, base_name, base_names
from curation.findings import SUSPICIONS, Finding, finding, merged
from curation.runs import Ungradable
from curation.tasks.checks.proving import CHECKS_VERSION
from envd.client import VerifyResult

VERIFIER_VERSION = "10"
"""Bump if the same final state may get another verdict, after changes of this file, verify, LIMITS, cheating, checks,
states, or the test runs and reports of envd.
"""

CONFIRMED_VERSION = "1"
"""Bump if `Verifier.confirm` may count other tests of the same final state."""


class TestVerdict(Frozen):
    """Result of one hidden test."""

    __test__ = False
    name: str
    status: str
    """passed, failed, error, skipped or missing. Only passed is passed."""
    message: str


class Verdict(Frozen):
    """Grade of one final state."""

    solved: bool
    """The run completed and every named test reported passed."""
    exit: str
    """completed, crashed, timed_out, apply_failed, or ungradable: verification fails in fresh sandboxes, but succeeds
    for a control state.
    """
    tests: list[TestVerdict]
    findings: tuple[Finding, ...] = ()
    """Attempts to influence the verdict; a tampering finding makes the state unsolved."""
    backend: str = ""
    """Sandbox backend of the first run; empty for a state that was not run, or a verdict of an earlier version.

    Not part of the key: all backends give the same verdict (tests/envd/test_verify_backends.py).
    """

    @property
    def tampered(self) -> bool:
        """Whether a finding is tampering."""
        return any(each.tampering for each in self.findings)

    @property
    def tests_passed(self) -> int:
        """Number of named tests that passed; 0 for a tampered state."""
        return 0 if self.tampered else sum(test.status == "passed" for test in self.tests)

    @property
    def tests_total(self) -> int:
        """Number of tests that the task names."""
        return len(self.tests)


def verdict_key(task: Task, diff: bytes, part: Sequence[str] = ()) -> str:
    """Store key of the verdict of a final state. part: tests of a verdict on only some, see `Verifier.confirm`."""
    key = digest_of(
        {"task": task.digest, "final_state": sha256(diff), "verifier": VERIFIER_VERSION}
        | ({"confirmed": CONFIRMED_VERSION, "tests": list(part)} if part else {})
    )
    return f"verdicts/{key[:2]}/{key}.json"


def checks_key(task: Task) -> str:
    """Store key of the checks of a task whose suite contains none."""
    key = digest_of({"task": task.digest, "checks": CHECKS_VERSION, "verifier": VERIFIER_VERSION})
    return f"checks/{key[:2]}/{key}.json"


def read_checks(store: Store, key: str) -> Checks | None:
    """Checks stored under `key`, or None if they are missing or unreadable (they are then made again)."""
    try:
        return Checks.from_json(store.local_path(key).read_text())
    except (ArtifactMissing, FileNotFoundError):
        return None
    except (ValueError, KeyError, TypeError):
        store.forget(key)
        return None


def read_verdict(store: Store, key: str) -> Verdict | None:
    """Verdict stored under `key`, or None. Raises ArtifactCorrupt."""
    for _ in range(2):
        try:
            return Verdict.model_validate_json(store.local_path(key).read_bytes())
        except (ArtifactMissing, FileNotFoundError):
            return None
        except ValidationError:
            if not store.forget(key):  # so that a damaged copy is fetched again
                break
    raise ArtifactCorrupt(f"verdict {key} in {store.url} is not readable: delete that file; the next run grades again")


def make_verdict(
    tests: tuple[str, ...], result: VerifyResult, checks: Checks | None = None, evidence: Evidence | None = None
) -> Verdict:
    """Verdict on all named tests; a test without a report, or with two different reports, did not pass.

    checks: proven checks of the task. evidence: findings of the runs beside the first.
    """
    reports: dict[str, TestVerdict] = {}
    for outcome in result.outcomes:
        known = reports.get(outcome.name)
        if known is None or known.status == "passed":
            reports[outcome.name] = TestVerdict(name=outcome.name, status=outcome.status, message=outcome.message)
    rows = [reports.get(name) or TestVerdict(name=name, status="missing", message="did not report") for name in tests]
    why = evidence.tests if evidence else {}
    rows = [
        (
            row.model_copy(update={"status": "error", "message": why[base_name(row.name)]})
            if row.status == "passed" and base_name(row.name) in why
            else row
        )
        for row in rows
    ]
    known_names = checks.known if checks else ()
    findings = merged(
        [
            *(evidence.findings if evidence else ()),
            *(finding(name) for name in result.tampering if name not in known_names),
        ]
    )
    solved = result.exit == "completed" and bool(rows) and all(row.status == "passed" for row in rows)
    solved = solved and not any(each.tampering for each in findings)
    if solved:  # what looked odd computes what it should
        findings = tuple(each for each in findings if each.kind not in SUSPICIONS)
    return Verdict(solved=solved, exit=result.exit, tests=rows, findings=findings, backend=result.backend)


def verdict_of(result: VerifyResult) -> Verdict:
    """Verdict on a final state that no hidden test grades: each check of its result must have passed."""
    return make_verdict(tuple(outcome.name for outcome in result.outcomes), result)


def wholly_passed(tests: Sequence[str], verdict: Verdict) -> tuple[str, ...]:
    """Those of `tests`, in order, whose functions passed with all the parameters that `tests` names."""
    good = {row.name for row in verdict.tests if row.status == "passed"}
    failed = base_names([test for test in tests if test not in good])
    return tuple(test for test in tests if base_name(test) not in failed)


def confirmed(verdict: Verdict, parts: Sequence[Verdict], rows: Verdict | None) -> Verdict:
    """The verdict on an unsolved state, in which of the tests that passed only the confirmed ones count.

    parts: verdicts on functions that passed, without those that failed in the one before; if the last is solved, it
    confirms its tests. rows: verdict on single parameters.
    """
    last = [*parts[-1:], *([rows] if rows else [])]
    sure = {row.name for each in last if each.solved or each is rows for row in each.tests if row.status == "passed"}
    found = [each for part in (verdict, *parts, *last) for each in part.findings]
    lost = {"status": "error", "message": "it passed, but runs without the failed tests do not confirm it"}
    return verdict.model_copy(
        update={
            "exit": next((each.exit for each in last if each.exit in ("timed_out", "ungradable")), verdict.exit),
            "tests": [
                row.model_copy(update=lost) if row.status == "passed" and row.name not in sure else row
                for row in verdict.tests
            ],
            "findings": merged(found),
        }
    )


def ungradable(tests: Sequence[str], error: Ungradable) -> Verdict:
    """Verdict on a state whose verification alone fails."""
    rows = [TestVerdict(name=name, status="missing", message=f"ungradable: {error}"[:500]) for name in tests]
    return Verdict(solved=False, exit="ungradable", tests=rows)
