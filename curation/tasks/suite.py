"""The quickstart suite: small repositories with one wrong line each, in three splits, deterministic by seed."""

from __future__ import annotations

from random import Random
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from contracts.tasks import Split, Task
from curation.errors import TaskError
from curation.tasks.bugs import VISIBLE_TEST, Bug, answer_line, draw_bugs, file_diff
from curation.tasks.families import BY_NAME, assertion, draw_cases, others
from curation.tasks.names import name_pools

SUITE_VERSION = "1"
HIDDEN_TEST = "tests/test_hidden.py"


class TaskSuiteConfig(BaseModel):
    """How many tasks a split holds, and from which seed."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    train: int = Field(default=448, ge=1, le=1_000_000)
    """Tasks that rollouts draw from."""
    gate: int = Field(default=128, ge=1, le=100_000)
    """Tasks that evaluation and stopping rules read."""
    held_out: int = Field(default=192, ge=1, le=100_000)
    """Tasks that no decision reads."""
    seed: int = Field(default=0, ge=0)
    """Deals the names and draws the tasks."""

    @property
    def count(self) -> int:
        """Tasks of all splits."""
        return self.train + self.gate + self.held_out

    @classmethod
    def of_count(cls, count: int, seed: int = 0) -> Self:
        """`count` tasks in the default proportions. Raises TaskError below 6."""
        if count < 6:
            raise TaskError(f"a suite of {count} tasks can't fill three splits: ask for at least 6")
        gate, held_out = max(1, count // 6), max(1, count // 4)
        return cls(train=count - gate - held_out, gate=gate, held_out=held_out, seed=seed)


class ImportedSuiteConfig(BaseModel):
    """A suite that `triplane tasks import` put into the experiment's store."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    kind: Literal["import"]
    """Discriminates it from a generated suite, whose numbers are given instead."""
    suite: str = Field(pattern=r"^[0-9a-f]{8,64}$")
    """Digest of the task_suite artifact, or at least its first eight digits."""


SuiteConfig = TaskSuiteConfig | ImportedSuiteConfig


def generate_tasks(config: TaskSuiteConfig) -> list[Task]:
    """All tasks, sorted by split (train, gate, held_out) and then by task_id."""
    pools = name_pools(config.seed)
    counts = {Split.TRAIN: config.train, Split.GATE: config.gate, Split.HELD_OUT: config.held_out}
    seen: set[str] = set()
    tasks = []
    for split, count in counts.items():
        bugs = draw_bugs(count, pools[split], Random(f"tasks/{config.seed}/{split.value}"), seen)
        tasks += sorted((make_task(bug, split) for bug in bugs), key=lambda task: task.task_id)
    return tasks


def make_task(bug: Bug, split: Split) -> Task:
    """The task that asks for this bug's fix. Its tests depend on the bug alone."""
    rng = Random(f"tests/{bug.identity}")
    before, after = bug.module(bug.wrong), bug.module(bug.family)
    cases = draw_cases(bug.family, rng)
    return Task(
        task_id=bug.task_id, family=bug.family.name, split=split, instruction=bug.instruction,
        files={
            bug.path: before.encode(), VISIBLE_TEST: visible_test(bug).encode(),
            "README.md": f"# {bug.path}\n\nRun its tests with `python -m pytest`.\n".encode(),
        },
        hidden_files={HIDDEN_TEST: _hidden_test(bug, cases).encode()},
        tests=tuple(f"{HIDDEN_TEST}::{name}" for name in cases),
        reference_diff=file_diff(bug.path, before, after),
        meta={
            "function": bug.function, "arguments": list(bug.arguments), "path": bug.path, "line": bug.line,
            "right": bug.answer(bug.family).strip(), "buggy": bug.answer(bug.wrong).strip(), "bug_family": bug.wrong.name,
        },
    )  # fmt: skip


def wrong_answers(task: Task) -> dict[str, bytes]:
    """By family, the patch that puts that family's expression in the wrong line; for every family but the right one."""
    path, number = str(task.meta["path"]), int(task.meta["line"])
    a, b = task.meta["arguments"]
    before = task.files[path].decode()
    patches = {}
    for family in others(BY_NAME[task.family]):
        lines = before.splitlines(keepends=True)
        lines[number - 1] = answer_line(family, (a, b)) + "\n"
        patches[family.name] = file_diff(path, before, "".join(lines)) if "".join(lines) != before else b""
    return patches


def visible_test(bug: Bug) -> str:
    """The test file that the agent gets: one assertion, which the wrong line may happen to pass."""
    rng = Random(f"visible/{bug.identity}")
    check = assertion(bug.family, bug.function, (rng.randint(1, 9), rng.randint(1, 9)))
    return f"from {bug.path.removesuffix('.py')} import {bug.function}\n\n\ndef test_visible():\n    {check}\n"


def _hidden_test(bug: Bug, cases: dict[str, list[tuple[int, int]]]) -> str:
    head = (
        "import sys\nfrom pathlib import Path\n\nsys.path.insert(0, str(Path(__file__).parents[1]))\n\n"
        f"from {bug.path.removesuffix('.py')} import {bug.function}\n"
    )
    bodies = [
        f"\n\ndef {name}():\n" + "".join(f"    {assertion(bug.family, bug.function, case)}\n" for case in test)
        for name, test in cases.items()
    ]
    return head + "".join(bodies)
