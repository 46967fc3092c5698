"""What all formats need of a task: the tests that fail before the fix, those that keep passing, and text patches."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from contracts.tasks import Split, Task
from curation.errors import TaskError
from curation.tasks.importing.splits import DEFAULT_SHARES
from curation.tasks.importing.trees import tree_patch
from curation.tasks.validate import BrokenTask
from curation.verify import Verifier


@dataclass(frozen=True)
class Prepared:
    """A task that can be written."""

    task: Task
    fail_to_pass: list[str]
    pass_to_pass: list[str]
    patch: str
    """The fix."""
    test_patch: str
    """Adds and changes the files that grading places."""
    repo: str
    """owner/name."""
    split: Split
    """An importable split; `unseen` counts as held_out, which no decision uses either."""


async def prepare(
    tasks: Sequence[Task], suite: str, verifier: Verifier, progress: Callable[[int, int], None] | None = None
) -> tuple[list[Prepared], list[BrokenTask]]:
    """Tasks to write, in their order, and those that can't be, with the reason. suite: its short digest.

    A task that does not name its failing tests is graded without a fix. Raises InfraFault if envd keeps failing.
    """
    found: list[Prepared] = []
    broken: list[BrokenTask] = []
    for number, task in enumerate(tasks, 1):
        try:
            found.append(await _prepared(task, suite, verifier))
        except TaskError as error:
            broken.append(BrokenTask(task_id=task.task_id, reason=str(error)))
        if progress is not None:
            progress(number, len(tasks))
    return found, broken


async def _prepared(task: Task, suite: str, verifier: Verifier) -> Prepared:
    if task.toolset or task.final_state.kind != "diff":
        raise TaskError(
            "it names a toolset or a final state other than a diff, which the format can't hold: leave it out"
        )
    failing = set(task.meta.get("fail_to_pass") or await _failing(task, verifier))
    replaced = {path: task.files[path] for path in task.hidden_files if path in task.files}
    return Prepared(
        task=task,
        fail_to_pass=[test for test in task.tests if test in failing],
        pass_to_pass=[test for test in task.tests if test not in failing],
        patch=_text(task.reference_diff, "fix"),
        test_patch=_text(tree_patch(replaced, task.hidden_files), "tests"),
        repo=_repo(task, suite),
        split=task.split if task.split in DEFAULT_SHARES else Split.HELD_OUT,
    )


async def _failing(task: Task, verifier: Verifier) -> list[str]:
    verdict = await verifier.grade(task, b"")
    return [test.name for test in verdict.tests if test.status != "passed"]


def _repo(task: Task, suite: str) -> str:
    if "repo" in task.meta:
        return str(task.meta["repo"])
    name = str(task.meta.get("repository") or f"suite-{suite}")
    return f"triplane/{re.sub('[^A-Za-z0-9._-]+', '-', name)}"


def _text(patch: bytes, what: str) -> str:
    try:
        return patch.decode()
    except UnicodeDecodeError:
        raise TaskError(f"the patch of its {what} is not UTF-8, which the format can't hold: leave it out") from None
