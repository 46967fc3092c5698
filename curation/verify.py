"""Verdicts: hidden tests on an episode's final state, in fresh sandboxes. Other kinds of states: curation/states.

    grade(task, diff) -> memory -> store (verdicts/) -> runs, once for identical requests in flight -> find_cheating
                                        ^----------------------------------------------------- make_verdict <-'
                                        created exclusively: the first verdict counts for everyone
    confirm(task, diff) -> grade -> of an unsolved state, the same again by the tests that it passed

Each run has its own sandbox. The first runs the tests as written. If they pass, further runs follow in random order:
without expectations, as decoys, and repeated; they start with the first if nothing else is being graded. `cheating`
compares the reports. A verdict depends only on (task, final state, verifier version), so rollouts may ask early and
rewards find it again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from contracts import tracing
from contracts.digests import canonical_json
from contracts.final_states import AnswerState, RequestsState
from contracts.store import Store
from contracts.tasks import Checks, Observed, Task
from curation.cheating import Evidence, agreeing, base_name, base_names, find_cheating, passed, passing, restricted
from curation.errors import CurationError
from curation.findings import finding
from curation.once import Once
from curation.runs import Runs, Ungradable
from curation.states.answer import grade_answer
from curation.states.requests import grade_requests
from curation.tasks.checks.proving import prove, wholly_observed
from curation.verdicts import (
    Verdict,
    checks_key,
    confirmed,
    make_verdict,
    read_checks,
    read_verdict,
    ungradable,
    verdict_key,
    verdict_of,
    wholly_passed,
)
from envd.client import SandboxClient, TestOutcome, VerifyResult

MAX_DIFF_BYTES = 32 * 1024 * 1024
"""A larger final state fails without a run: it exceeds envd's messages, and size must not exempt a policy from grading.
"""

REMEMBERED = 65_536
"""Verdicts kept in memory."""

_MOST_PARTS = 3
"""Times that `confirm` tries the tests that passed, each time without those that failed the time before."""


@dataclass
class _Flight:
    """Verification under way, with the number of callers that wait for it."""

    work: asyncio.Task[Verdict]
    waiting: int = 0


def _is_late(result: VerifyResult | None) -> bool:
    return result is not None and result.exit == "timed_out"


_OBSERVED, _REPEATED = -1, -2


@dataclass
class _Beside:
    """Results of the runs beside the first."""

    observed: VerifyResult | None
    decoys: list[VerifyResult]
    repeated: list[VerifyResult]

    @property
    def all(self) -> list[VerifyResult]:
        """Results of all kinds of runs."""
        return [*([self.observed] if self.observed else []), *self.decoys, *self.repeated]


class Verifier:
    """Grades final states through one envd server, with a cache in memory and in `store` (None: memory only).

    concurrency: verifications in flight at once. timeout_s: per run of the hidden tests, unless the task names it; a
    verdict of timed_out depends on the clock, so it is tried twice and never cached. eager: start all runs of a verdict
    at once if no other verdict is in progress: less time, but more work for a state that fails. runtimes: has the
    tasks' runtimes, if `store` does not. idle_s: as in `SandboxClient.verify`.
    """

    def __init__(
        self,
        client: SandboxClient,
        store: Store | None,
        *,
        concurrency: int = 32,
        timeout_s: float = 10,
        eager: bool = True,
        runtimes: Store | None = None,
        idle_s: float = 0,
    ) -> None:
        self._runs, self._store = Runs(client, timeout_s, runtimes or store, idle_s=idle_s), store
        self._slots = asyncio.Semaphore(concurrency)
        # one per slot: a remote store answers in tens of milliseconds
        self._readers = ThreadPoolExecutor(concurrency, "verdicts")
        self._memory: OrderedDict[str, Verdict] = OrderedDict()
        self._flights: dict[str, _Flight] = {}
        self._checks: Once[str, Checks] = Once()
        self._order = random.SystemRandom()
        self._eager, self._active = eager, 0

    @property
    def runs(self) -> int:
        """Number of test runs that envd completed."""
        return self._runs.count

    async def provide(self, task: Task) -> None:
        """Send the server a task's runtime, which its sandboxes need. Raises ArtifactMissing."""
        await self._runs.provide(task)

    async def grade(self, task: Task, diff: bytes) -> Verdict:
        """Verdict on `diff` applied to the task's repository.

        diff: the final state, also of a kind other than a diff. Raises InfraFault if envd keeps failing (the caller
        leaves the episode ungraded), CurationError for a task of hidden tests that has none.
        """
        with tracing.span("grade", {"triplane.task": task.task_id}) as span:
            verdict = await self._grade(task, diff)
            span.set({"triplane.solved": verdict.solved, "triplane.verdict": verdict.exit})
            return verdict

    async def _grade(self, task: Task, diff: bytes) -> Verdict:
        if isinstance(task.final_state, AnswerState):
            return verdict_of(grade_answer(task.final_state, diff))
        if isinstance(task.final_state, RequestsState):
            return verdict_of(grade_requests(task.final_state, diff))
        if not task.tests:
            raise CurationError(
                f"task {task.task_id} has no hidden tests, so it can't be solved: leave it out of the suite"
            )
        return await self._shared(verdict_key(task, diff), lambda: self._verify(task, diff))

    async def confirm(self, task: Task, diff: bytes) -> Verdict:
        """Verdict of `grade`, but a test of an unsolved state has passed only if runs without the failed tests agree.

        `grade` runs a state that fails a test once, so it believes the others. Here the functions that passed are run
        again without the failed ones, as written, observed and as decoys, as the tests of a solved state are. Of a
        function that failed with some parameters, as many have passed as values agree, if all its assertions are
        observed; otherwise none, since these runs have all parameters. Raises the errors of `grade`.
        """
        verdict = await self.grade(task, diff)
        if verdict.solved or not task.tests or not verdict.tests_passed:
            return verdict
        with tracing.span("confirm", {"triplane.task": task.task_id}) as span:
            checks, whole = await self.checks(task), wholly_passed(task.tests, verdict)
            parts, rows = (
                await self._functions(task, diff, checks, whole),
                await self._rows(task, diff, checks, verdict),
            )
            verdict = confirmed(verdict, parts, rows)
            span.set({"triplane.tests_passed": verdict.tests_passed, "triplane.verdict": verdict.exit})
            return verdict

    async def _functions(self, task: Task, diff: bytes, checks: Checks, tests: tuple[str, ...]) -> list[Verdict]:
        """Verdicts on the tests of functions that passed: on all, then on those that passed alone, until none fails."""
        parts: list[Verdict] = []
        while tests and len(parts) < _MOST_PARTS:
            part = dataclasses.replace(task, tests=tests, checks=restricted(checks, base_names(tests)))
            verify = partial(self._verify, part, diff, part=True)
            parts.append(await self._shared(verdict_key(task, diff, tests), verify))
            before, tests = tests, wholly_passed(tests, parts[-1])
            if parts[-1].tampered or tests == before:
                break
        return parts

    async def _rows(self, task: Task, diff: bytes, checks: Checks, verdict: Verdict) -> Verdict | None:
        """Verdict on the passed parameters of functions that failed with others; None if no values tell.

        Functions of which a parameter ended the run are left out: they would end this one, too.
        """
        failed = {base_name(row.name) for row in verdict.tests if row.status != "passed"}
        failed -= {base_name(row.name) for row in verdict.tests if row.status == "missing"}
        tests = tuple(row.name for row in verdict.tests if row.status == "passed" and base_name(row.name) in failed)
        if not tests or checks.observed is None:
            return None
        told = await asyncio.to_thread(wholly_observed, base_names(task.tests), checks.observed, task.hidden_files)
        tests = tuple(test for test in tests if base_name(test) in told)
        if not tests:
            return None
        count = partial(self._count, task, diff, checks, checks.observed, tests)
        return await self._shared(verdict_key(task, diff, tests), count)

    async def _count(
        self, task: Task, diff: bytes, checks: Checks, observed: Observed, tests: tuple[str, ...]
    ) -> Verdict:
        """Verdict on some parameters of functions: as many have passed as values agree in a run of all of them."""
        try:
            result = await self._runs.run(task, diff, observed.placed(task.hidden_files), base_names(tests))
        except Ungradable as error:
            return ungradable(tests, error)
        named = Counter(map(base_name, task.tests))
        left = {
            name: await asyncio.to_thread(agreeing, observed, name, named[name], result) for name in base_names(tests)
        }
        outcomes = []
        for test in tests:
            left[base_name(test)] -= 1
            outcomes.append(TestOutcome(test, "passed" if left[base_name(test)] >= 0 else "error"))
        return make_verdict(tests, dataclasses.replace(result, outcomes=tuple(outcomes)), checks)

    async def _shared(self, key: str, verify: Callable[[], Coroutine[None, None, Verdict]]) -> Verdict:
        """Verdict of a key: remembered, or made once for all callers at once."""
        if key in self._memory:
            self._memory.move_to_end(key)
            return self._memory[key]
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(asyncio.create_task(self._settle(key, verify)))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.work)
        finally:
            flight.waiting -= 1
            if flight.waiting == 0:
                flight.work.cancel()
                if self._flights.get(key) is flight:
                    del self._flights[key]

    async def checks(self, task: Task) -> Checks:
        """Checks of a task: from its suite, or made, proven and cached.

        Raises InfraFault.
        """
        if task.checks is not None:
            return task.checks
        return await self._checks.get(task.digest, lambda: self._prove(task))

    async def _prove(self, task: Task) -> Checks:
        key = checks_key(task)
        found = None if self._store is None else read_checks(self._store, key)
        if found is not None:
            return found
        try:
            run = partial(self._runs.run, task, task.reference_diff)
            proof = await prove(task, run)
        except Ungradable:  # a broken task, as its verdict shows: nothing can be proven
            return Checks(None, (), base_names(task.tests))
        if passed(task.tests, proof.written):
            # the proof's run also gives the verdict on the reference solution
            self._memory[verdict_key(task, task.reference_diff)] = make_verdict(task.tests, proof.written, proof.checks)
        if self._store is not None and not self._store.create(key, proof.checks.to_json().encode(), cached=True):
            return read_checks(self._store, key) or proof.checks
        return proof.checks

    async def _settle(self, key: str, verify: Callable[[], Coroutine[None, None, Verdict]]) -> Verdict:
        async with self._slots:
            loop = asyncio.get_running_loop()
            verdict = await loop.run_in_executor(self._readers, self._recall, key)
            if verdict is None:
                verdict = await verify()
                if verdict.exit in ("timed_out", "crashed"):
                    # retry: the cause may be the graded state, a busy machine or a killed process
                    verdict = await verify()
                if verdict.exit == "timed_out":
                    return verdict
                verdict = await loop.run_in_executor(self._readers, self._record, key, verdict)
        self._memory[key] = verdict
        if len(self._memory) > REMEMBERED:
            self._memory.popitem(last=False)
        return verdict

    async def _verify(self, task: Task, diff: bytes, *, part: bool = False) -> Verdict:
        """Verdict of new runs. part: the task has a part of its tests, which have passed beside the others."""
        if len(diff) > MAX_DIFF_BYTES:
            return make_verdict(task.tests, VerifyResult((), "apply_failed", ""))
        self._active += 1
        beside: asyncio.Task[_Beside] | None = None
        try:
            if (
                self._eager and self._active == 1 and self._known(task)
            ):  # no other verification waits for the second core
                beside = asyncio.create_task(self._beside(task, diff, await self.checks(task), part=part))
            written = await self._runs.run(task, diff)
            if passed(task.tests, written):
                return await self._doubt(task, diff, written, await self.checks(task), beside, part=part)
            return make_verdict(task.tests, written, await self.checks(task) if written.tampering else None)
        except Ungradable as error:
            return ungradable(task.tests, error)
        finally:
            self._active -= 1
            if beside is not None and not beside.done():
                beside.cancel()
                await asyncio.gather(beside, return_exceptions=True)

    def _known(self, task: Task) -> bool:
        """Whether a task's checks are available without making them."""
        return task.checks is not None or self._checks.done(task.digest)

    async def _doubt(
        self,
        task: Task,
        diff: bytes,
        written: VerifyResult,
        checks: Checks,
        begun: asyncio.Task[_Beside] | None,
        *,
        part: bool,
    ) -> Verdict:
        """Verdict on a state whose tests pass as written.

        begun: the runs beside the first, if they already started. Where one of them that timed out decides, the verdict
        is `timed_out`, since it depends on the clock. part: see `_verify`.
        """
        found = await (begun or self._beside(task, diff, checks, part=part))
        evidence = await asyncio.to_thread(find_cheating, checks, found.observed, found.decoys, part=part)
        late = _is_late(found.observed)
        if evidence.findings:  # run again, so that an unstable test is not reported as tampering
            again = await self._beside(task, diff, checks, repeat=True)
            second = await asyncio.to_thread(find_cheating, checks, again.observed, again.decoys, part=part)
            found.repeated.extend(again.repeated)
            late = late or _is_late(again.observed)
            # a decoy that times out does not pass, so findings of decoys do not depend on time
            lasting = {each.name for each in second.findings if each.kind == "decoy" or not late}
            evidence = Evidence(
                tuple(each for each in evidence.findings if each.name in lasting)
                or tuple(finding(f"unstable:{test}", f"once {reason}") for test, reason in evidence.tests.items()),
                evidence.tests,
            )
        for result in found.repeated:
            lost = {base_name(test) for test in task.tests if test not in passing(result)}
            if lost:
                names = tuple(
                    finding(f"unstable:{test}", "passed once and failed once, as written") for test in sorted(lost)
                )
                why = dict.fromkeys(lost, "unstable: it passed once and failed once")
                evidence = Evidence((*evidence.findings, *names), why | dict(evidence.tests))
        late = late or any(map(_is_late, found.repeated))
        if late and evidence.tests and not any(each.tampering for each in evidence.findings):
            written = dataclasses.replace(written, exit="timed_out")
        named = [*written.tampering, *(name for result in found.all for name in result.tampering)]
        written = dataclasses.replace(written, tampering=tuple(dict.fromkeys(named)))
        told = [each.name for each in evidence.findings if each.kind != "unconfirmed"]
        if told:
            await self._runs.tell(task, told)
        return make_verdict(task.tests, written, checks, evidence)

    async def _beside(
        self, task: Task, diff: bytes, checks: Checks, *, repeat: bool = False, part: bool = False
    ) -> _Beside:
        """Runs without expectations, of decoys, and repeated as written, in random order."""
        tests = base_names(task.tests)
        observed, hidden = checks.observed, task.hidden_files
        # other tests may never end in a decoy
        ending = {*checks.beside, *(test for decoy in checks.decoys for test in decoy.tests)}
        names = tuple(test for test in tests if test in ending)
        asked: list[tuple[int, dict[str, bytes], tuple[str, ...]]] = [
            (number, hidden | decoy.files, names) for number, decoy in enumerate(checks.decoys)
        ]
        if observed is not None:
            asked.append((_OBSERVED, observed.placed(hidden), tests))
        # the observed run already repeats the observed tests; those of a part have passed beside the others
        if repeat or not (part or set(tests) <= checks.fully_observed):
            asked.append((_REPEATED, hidden, task.tests))
        self._order.shuffle(asked)
        results = await asyncio.gather(*(self._runs.run(task, diff, files, named) for _, files, named in asked))
        by_kind = {kind: result for (kind, _, _), result in zip(asked, results, strict=True)}
        return _Beside(
            by_kind.get(_OBSERVED),
            [by_kind[number] for number in range(len(checks.decoys))],
            [by_kind[_REPEATED]] if _REPEATED in by_kind else [],
        )

    def _recall(self, key: str) -> Verdict | None:
        return None if self._store is None else read_verdict(self._store, key)

    def _record(self, key: str, verdict: Verdict) -> Verdict:
        """Store a verdict. Returns the stored one, which may be another process's."""
        if self._store is None or self._store.create(key, canonical_json(verdict.model_dump()), cached=True):
            return verdict
        return self._recall(key) or verdict
