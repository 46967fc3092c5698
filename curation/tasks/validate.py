"""Prove tasks in sandboxes: tests fail before the fix and pass after it; neither cheats nor other answers pass.

Of similar generated tasks one per family is probed; every imported task (whose meta names the failing tests) is probed.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field

from contracts.artifacts import Frozen
from contracts.final_states import AnswerState, DatabaseState, DiffState, RequestsState, answer_bytes
from contracts.store import Store
from contracts.tasks import Task
from curation.states.answer import answer_cheats
from curation.states.database import database_cheats
from curation.states.requests import requests_cheats, requests_state
from curation.tasks.bugs import file_diff
from curation.tasks.suite import wrong_answers
from curation.verdicts import Verdict
from curation.verify import Verifier
from envd.client import SandboxClient

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called with (finished tasks and probes, total)."""
_BATCH = 256
_CONFTEST = """import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    report.outcome, report.longrepr = "passed", None
"""
_SKIP = 'import pytest\n\npytest.skip("not today", allow_module_level=True)\n'
_EXIT = "import os\n\nos._exit(0)\n"
RESTORED = "conftest_passes"
"""Cheat whose change is undone before the tests run."""


def _escaped(text: str) -> str:
    """The text with escapes for what UTF-8 can't express: names of broken tasks come from sources as they are."""
    return text.encode("utf-8", "backslashreplace").decode()


class BrokenTask(Frozen):
    """Task left out of the suite, with the reason."""

    task_id: Annotated[str, AfterValidator(_escaped)]
    reason: Annotated[str, AfterValidator(_escaped)]


class CheatResult(Frozen):
    """Result of one cheat at one task."""

    family: str
    task_id: str
    cheat: str
    solved: bool
    exit: str
    """Exit of the verification."""


class ValidationReport(Frozen):
    """Result of the validation. Contains no timings, since it is part of the suite's content."""

    tasks: int
    """Number of validated tasks."""
    broken: list[BrokenTask]
    families: dict[str, int]
    """Sound tasks by family."""
    cheats: list[CheatResult]
    """Results of the cheats. solved must be false, except for imported tasks, which a solving cheat makes broken."""
    wrong_answers: int
    """Expressions of other families tried on one generated task of each family; a task that accepts one is broken."""
    decoys: int = 0
    """Decoys of sound tasks: versions of hidden tests that the reference solution demonstrably fails."""
    observed: int = 0
    """Hidden tests of sound tasks whose values are compared outside the run."""
    undecided: dict[str, list[str]] = Field(default_factory=dict)
    """Sound tests, by task, without a possible decoy or observation: passing them as written suffices."""


async def validate_tasks(
    tasks: Sequence[Task],
    client: SandboxClient,
    progress: Progress | None = None,
    *,
    store: Store | None = None,
    verifier: Verifier | None = None,
) -> tuple[ValidationReport, list[Task]]:
    """Grade every task before and after its reference fix; probe one task of each family, and every imported one, with
    cheats.

    Returns the report, and the sound tasks in their order, with decoys and observations proven on their references.
    store: caches verdicts, so that an interrupted validation resumes. verifier: of a caller that has just proven the
    tasks' checks, which are kept. Raises InfraFault if envd keeps failing.
    """
    if verifier is None:
        verifier = Verifier(client, store)
        tasks = [dataclasses.replace(task, checks=None) for task in tasks]  # checks stored in a suite are proven again
    probes = list({task.task_id if is_imported(task) else task.family: task for task in reversed(tasks)}.values())
    count = _Count(len(tasks) + len(probes), progress)
    reasons: dict[str, str] = {}
    for batch in _batches(tasks):
        found = await asyncio.gather(*(count.after(_soundness(verifier, task)) for task in batch))
        reasons.update({task.task_id: reason for task, reason in zip(batch, found, strict=True) if reason})
    cheats: list[CheatResult] = []
    tried = 0
    for task in sorted(probes, key=lambda task: (task.family, task.task_id)):
        if is_imported(task) and task.task_id in reasons:
            count.tick()
            continue
        results, accepted = await count.after(_probe(verifier, task))
        cheats += results
        tried += len(_wrong_answers(task))
        fooled = [result.cheat for result in results if result.solved and is_imported(task)]
        if fooled:
            reasons.setdefault(task.task_id, f"the cheat {fooled[0]} passes its tests")
        if accepted:
            reasons.setdefault(task.task_id, f"its tests accept the expression of {accepted[0]}")
    sound = [
        dataclasses.replace(task, checks=await verifier.checks(task)) if task.tests else task
        for task in tasks
        if task.task_id not in reasons
    ]
    checks = {task.task_id: task.checks for task in sound if task.checks is not None}
    return (
        ValidationReport(
            tasks=len(tasks),
            families=dict(sorted(Counter(task.family for task in sound).items())),
            cheats=cheats,
            wrong_answers=tried,
            broken=[BrokenTask(task_id=name, reason=reason) for name, reason in sorted(reasons.items())],
            decoys=sum(len(each.decoys) for each in checks.values()),
            observed=sum(len(each.fully_observed) for each in checks.values()),
            undecided={name: list(each.undecided) for name, each in sorted(checks.items()) if each.undecided},
        ),
        sound,
    )


def cheat_states(task: Task) -> dict[str, bytes]:
    """Final states, by name, that try to pass without a solution.

    Those of hidden tests are patches that exit with status 0, skip all tests, or mark all tests as passed.
    """
    if isinstance(task.final_state, AnswerState):
        return answer_cheats(task.instruction)
    if isinstance(task.final_state, DatabaseState):
        return database_cheats(task.final_state, task.files)
    if isinstance(task.final_state, RequestsState):
        return requests_cheats(task.final_state)
    path = str(task.meta["path"])
    before, conftest = (
        task.files[name].decode(errors="replace") if name in task.files else None for name in (path, "conftest.py")
    )
    return {
        "exit_zero": file_diff(path, before, _EXIT),
        "skip_all": file_diff(path, before, _SKIP),
        RESTORED: file_diff("conftest.py", conftest, _CONFTEST),
    }


def is_imported(task: Task) -> bool:
    """Whether the task is imported: then its meta names the tests that must fail before the fix."""
    return "fail_to_pass" in task.meta


async def _soundness(verifier: Verifier, task: Task) -> str | None:
    """Reason why a task is broken, or None."""
    await verifier.checks(task)  # also grades the reference
    before, after = await asyncio.gather(verifier.grade(task, b""), verifier.grade(task, reference_state(task)))
    if not isinstance(task.final_state, DiffState):
        return _wrong_state(before, after)
    if before.solved:
        return "its hidden tests pass before the fix"
    if is_imported(task):
        return contradiction(task, before, after)
    if before.exit != "completed" or not any(test.status == "failed" for test in before.tests):
        return f"its hidden tests do not run before the fix ({_summary(before)})"
    if not after.solved:
        return f"its hidden tests do not pass after the fix ({_summary(after)})"
    return None


def reference_state(task: Task) -> bytes:
    """Final state that solves a task."""
    if isinstance(task.final_state, RequestsState):
        return requests_state(task.final_state.requests)
    return answer_bytes(task.final_state.expected) if isinstance(task.final_state, AnswerState) else task.reference_diff


def _wrong_state(before: Verdict, after: Verdict) -> str | None:
    """What is wrong with a task that no hidden test grades, or None."""
    if before.solved:
        return "its final state is right before anything is done"
    failed = next((test for test in after.tests if test.status != "passed"), None)
    if failed is not None:
        return f"its reference is not right: {failed.name}: {failed.message}"
    return None if after.solved else f"its reference is not right ({_summary(after)})"


def contradiction(task: Task, before: Verdict, after: Verdict) -> str | None:
    """Contradiction between the verdicts and an imported task, or None. Before the fix, imports may fail."""
    early = [test.name for test in before.tests if test.name in task.meta["fail_to_pass"] and test.status == "passed"]
    if early:
        return f"its test {early[0]} is said to fail before the fix, and passes"
    if after.exit != "completed":
        return (
            f"its tests do not run to their end after the fix ({_summary(after)}): they have 10 s and the packages of"
            " this environment"
        )
    failed = next((test for test in after.tests if test.status != "passed"), None)
    if failed is not None:
        return (
            f"its test {failed.name} does not pass after the fix: {failed.status},"
            f" {' '.join(failed.message.split()) or 'no message'}"
        )
    if not after.solved:
        named = ", ".join(each.name for each in after.findings if each.tampering)
        return f"its fix counts as tampering with verdicts ({named})"
    return None


def _wrong_answers(task: Task) -> dict[str, bytes]:
    return {} if is_imported(task) else wrong_answers(task)


async def _probe(verifier: Verifier, task: Task) -> tuple[list[CheatResult], list[str]]:
    """Results of the cheats, and the families that accepted another expression."""
    cheats, wrong = cheat_states(task), _wrong_answers(task)
    verdicts = await asyncio.gather(*(verifier.grade(task, diff) for diff in [*cheats.values(), *wrong.values()]))
    results = [
        CheatResult(family=task.family, task_id=task.task_id, cheat=cheat, solved=verdict.solved, exit=verdict.exit)
        for cheat, verdict in zip(cheats, verdicts, strict=False)
    ]
    accepted = [name for name, verdict in zip(wrong, verdicts[len(cheats) :], strict=True) if verdict.solved]
    return results, accepted


def _summary(verdict: Verdict) -> str:
    statuses = Counter(test.status for test in verdict.tests)
    return ", ".join([verdict.exit, *(f"{count} {status}" for status, count in sorted(statuses.items()))])


class _Count:
    """Counts finished work and reports it to `progress`."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._done, self._total, self._progress = 0, total, progress

    async def after(self, work: Awaitable[T]) -> T:
        result = await work
        self.tick()
        return result

    def tick(self) -> None:
        """Count one."""
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)


def _batches(tasks: Sequence[Task]) -> Iterator[Sequence[Task]]:
    return (tasks[start : start + _BATCH] for start in range(0, len(tasks), _BATCH))
