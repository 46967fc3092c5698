"""Verdicts: hidden tests on an episode's final state, in a sandbox that no agent ever touched.

    grade(task, diff) -> memory -> store (verdicts/) -> envd.verify, once for identical requests in flight
                                        ^------------------' created exclusively: the first verdict counts for everyone

A verdict depends on (task, final state, verifier version) only, so rollouts may ask early and rewards find it again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from pydantic import ValidationError

from contracts.artifacts import Frozen
from contracts.digests import canonical_json, digest_of, sha256
from contracts.errors import ArtifactCorrupt, ArtifactMissing, TriplaneError
from contracts.store import Store
from contracts.tasks import Task
from curation.errors import CurationError, InfraFault
from curation.findings import Finding, finding, merged
from envd.client import Limits, SandboxClient, VerifyResult

VERIFIER_VERSION = "3"
"""Bump when the same final state may get another verdict: this file, LIMITS, or what envd runs and reports."""

LIMITS = Limits()
"""Of every verifying sandbox. Fixed, since memory and processes decide outcomes; covered by VERIFIER_VERSION."""

ATTEMPTS = 4
BACKOFF_S = 0.25
"""First pause after an infrastructure fault; doubles with each, jittered by half."""

MAX_DIFF_BYTES = 32 * 1024 * 1024
"""A larger final state fails without a run: it would not fit envd's messages, and a policy must not escape its grade by size."""

REMEMBERED = 65_536
"""Verdicts kept in memory."""

log = logging.getLogger(__name__)


class TestVerdict(Frozen):
    """What one named hidden test reported."""

    __test__ = False
    name: str
    status: str
    """passed, failed, error, skipped or missing. Only passed is passed."""
    message: str


class Verdict(Frozen):
    """The grade of one final state."""

    solved: bool
    """The run completed and every named test reported passed."""
    exit: str
    """completed, crashed, timed_out or apply_failed."""
    tests: list[TestVerdict]
    findings: tuple[Finding, ...] = ()
    """What was tried on the verdict, by name; one that is tampering makes the state unsolved."""

    @property
    def tampered(self) -> bool:
        """Whether anything found is tampering."""
        return any(each.tampering for each in self.findings)

    @property
    def tests_passed(self) -> int:
        """How many named tests passed."""
        return sum(test.status == "passed" for test in self.tests)

    @property
    def tests_total(self) -> int:
        """How many tests the task names."""
        return len(self.tests)


def verdict_key(task: Task, diff: bytes) -> str:
    """Where in the store the verdict of this final state lives."""
    key = digest_of({"task": task.digest, "final_state": sha256(diff), "verifier": VERIFIER_VERSION})
    return f"verdicts/{key[:2]}/{key}.json"


def read_verdict(store: Store, key: str) -> Verdict | None:
    """The verdict recorded under `key`, or None. Raises ArtifactCorrupt."""
    for _ in range(2):
        try:
            return Verdict.model_validate_json(store.local_path(key).read_bytes())
        except (ArtifactMissing, FileNotFoundError):
            return None
        except ValidationError:
            if not store.forget(key):  # a damaged copy is fetched again
                break
    raise ArtifactCorrupt(f"verdict {key} in {store.url} is not readable: delete that file; it will be graded again")


def judge(tests: tuple[str, ...], result: VerifyResult) -> Verdict:
    """Exact accounting of the named tests: one that did not report, or reported twice with different words, did not pass."""
    reports: dict[str, TestVerdict] = {}
    for outcome in result.outcomes:
        known = reports.get(outcome.name)
        if known is None or known.status == "passed":
            reports[outcome.name] = TestVerdict(name=outcome.name, status=outcome.status, message=outcome.message)
    rows = [reports.get(name) or TestVerdict(name=name, status="missing", message="did not report") for name in tests]
    solved = result.exit == "completed" and bool(rows) and all(row.status == "passed" for row in rows)
    findings = merged(finding(name) for name in result.tampering)
    return Verdict(
        solved=solved and not any(each.tampering for each in findings), exit=result.exit, tests=rows, findings=findings
    )


@dataclass
class _Flight:
    """One verification under way and how many callers wait for it."""

    work: asyncio.Task[Verdict]
    waiting: int = 0


class Verifier:
    """Grades final states through one envd server, remembering verdicts in memory and in `store` (None: memory only).

    concurrency: verifications in flight at once. timeout_s: of one run of a task's hidden tests; a verdict of timed_out depends on the
    clock, so it is tried twice and never remembered.
    """

    def __init__(
        self, client: SandboxClient, store: Store | None, *, concurrency: int = 32, timeout_s: float = 10
    ) -> None:
        self._client, self._store, self._timeout_s = client, store, timeout_s
        self._slots = asyncio.Semaphore(concurrency)
        # as many as there are slots: far away, a store answers in tens of milliseconds
        self._readers = ThreadPoolExecutor(concurrency, "verdicts")
        self._memory: OrderedDict[str, Verdict] = OrderedDict()
        self._flights: dict[str, _Flight] = {}
        self._templates: dict[str, str] = {}
        self.runs = 0
        """Verifications really run by envd."""

    async def grade(self, task: Task, diff: bytes) -> Verdict:
        """The verdict on `diff` applied to the task's repository.

        Raises InfraFault when envd keeps failing (the caller leaves the episode ungraded), CurationError for a task without hidden tests.
        """
        if not task.tests:
            raise CurationError(
                f"task {task.task_id} names no hidden tests: nothing could be solved; leave it out of the suite"
            )
        key = verdict_key(task, diff)
        if key in self._memory:
            self._memory.move_to_end(key)
            return self._memory[key]
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(self._settle(key, task, diff)))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.work)
        finally:
            flight.waiting -= 1
            if flight.waiting == 0:
                flight.work.cancel()
                if self._flights.get(key) is flight:
                    del self._flights[key]

    async def _settle(self, key: str, task: Task, diff: bytes) -> Verdict:
        async with self._slots:
            loop = asyncio.get_running_loop()
            verdict = await loop.run_in_executor(self._readers, self._recall, key)
            if verdict is None:
                verdict = await self._verify(task, diff)
                if verdict.exit in (
                    "timed_out",
                    "crashed",
                ):  # by what was graded, or by a busy machine or somebody's kill
                    verdict = await self._verify(task, diff)
                if verdict.exit == "timed_out":
                    return verdict
                verdict = await loop.run_in_executor(self._readers, self._record, key, verdict)
        self._memory[key] = verdict
        if len(self._memory) > REMEMBERED:
            self._memory.popitem(last=False)
        return verdict

    async def _verify(self, task: Task, diff: bytes) -> Verdict:
        if len(diff) > MAX_DIFF_BYTES:
            return judge(task.tests, VerifyResult((), "apply_failed", ""))
        fault: TriplaneError | None = None
        for attempt in range(ATTEMPTS):
            if fault is not None:
                log.warning("verifying %s failed (attempt %d of %d): %s", task.task_id, attempt, ATTEMPTS, fault)
                await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
            try:
                template = await self._template(task)
                self.runs += 1
                result = await self._client.verify(
                    template, diff, task.hidden_files, task.tests,
                    limits=LIMITS, timeout_s=self._timeout_s, artifacts=task.artifacts,
                )  # fmt: skip
                return judge(task.tests, result)
            except TriplaneError as error:
                self._templates.pop(task.image_digest, None)  # a restarted server may have lost it
                fault = error
        raise InfraFault(
            f"task {task.task_id} could not be verified in {ATTEMPTS} attempts ({fault}): check the envd server, then run the same step again"
        ) from fault

    async def _template(self, task: Task) -> str:
        image = task.image_digest
        if image not in self._templates:
            self._templates[image] = await self._client.put_template(task.files)
        return self._templates[image]

    def _recall(self, key: str) -> Verdict | None:
        return None if self._store is None else read_verdict(self._store, key)

    def _record(self, key: str, verdict: Verdict) -> Verdict:
        """The verdict that counts: this one, or the one that another process recorded first."""
        if self._store is None or self._store.create(key, canonical_json(verdict.model_dump()), cached=True):
            return verdict
        return self._recall(key) or verdict
