"""Tasks of one file and their verdicts on a real envd server."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence

from contracts.tasks import Checks, Split, Task
from curation.tasks.importing.trees import tree_patch
from curation.verdicts import Verdict
from curation.verify import Verifier
from envd.client import SandboxClient
from envd.local import LocalEnvd


def task_of(path: str, wrong: str, right: str, tests: str, names: Sequence[str], **others: str) -> Task:
    """A task about one file. names: tests of the hidden file. others: further files, by name without `.py`."""
    files = {f"{name}.py": text.encode() for name, text in others.items()} | {path: wrong.encode()}
    hidden = {"tests/test_hidden.py": tests.encode()}
    reference = tree_patch(files, files | {path: right.encode()})
    about = {"path": path, "fail_to_pass": []}
    called = tuple(f"tests/test_hidden.py::{name}" for name in names)
    return Task(path, path, Split.TRAIN, "x", files, hidden, called, reference, about)


def proven(task: Task) -> Checks:
    """Checks of a task, made on a server of their own."""

    async def run(address: str) -> Checks:
        async with SandboxClient(address) as client:
            return await Verifier(client, None).checks(task)

    with LocalEnvd() as envd:
        return asyncio.run(run(envd.address))


def graded(task: Task, *states: Mapping[str, str], confirm: bool = False, timeout_s: float = 10) -> list[Verdict]:
    """Verdicts of states with these files changed, one after another, on a new server."""

    async def run(address: str) -> list[Verdict]:
        async with SandboxClient(address) as client:
            verifier = Verifier(client, None, eager=False, timeout_s=timeout_s)
            grade = verifier.confirm if confirm else verifier.grade
            changes = [{path: text.encode() for path, text in state.items()} for state in states]
            return [await grade(task, tree_patch(task.files, {**task.files, **each})) for each in changes]

    with LocalEnvd() as envd:
        return asyncio.run(run(envd.address))


def with_checks(task: Task) -> Task:
    """The task with its checks, which a suite's builder would have proved."""
    return dataclasses.replace(task, checks=proven(task))
