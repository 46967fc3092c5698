"""The quickstart suite: small repositories of two or three modules with one wrong line, in four splits, deterministic
by seed.
"""

from __future__ import annotations

from random import Random
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SerializerFunctionWrapHandler, model_serializer

from contracts.tasks import Split, Task
from curation.errors import TaskError
from curation.tasks.bugs import VISIBLE_TEST, Bug, draw_bugs, file_diff
from curation.tasks.cases import Case, assertion, draw_cases
from curation.tasks.difficulty.config import DifficultyConfig
from curation.tasks.operations import BY_NAME, OPERATIONS_VERSION, allowed

SUITE_VERSION = f"2{OPERATIONS_VERSION}"
HIDDEN_TEST = "tests/test_hidden.py"


class _Suite(BaseModel):
    """What generated and imported suites share."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_serializer(mode="wrap")
    def _leave_out_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Dump the fields, without `difficulty` if unset, so that digests stay as they are without it."""
        values: dict[str, Any] = dump(self)
        return {name: value for name, value in values.items() if name != "difficulty" or value is not None}

    @property
    def made_from(self) -> dict[str, Any]:
        """Settings that affect the suite itself."""
        return self.model_dump(mode="json", exclude={"difficulty"})


class TaskSuiteConfig(_Suite):
    """Number of tasks per split, and the seed."""

    train: int = Field(default=448, ge=1, le=1_000_000)
    """Tasks of the split train, from which rollouts draw."""
    gate: int = Field(default=128, ge=1, le=100_000)
    """Tasks of the split gate, for promotion and stopping rules."""
    held_out: int = Field(default=96, ge=1, le=100_000)
    """Tasks of the split held_out, with compositions of operations that train and gate lack. No decision uses them."""
    unseen: int = Field(default=48, ge=1, le=100_000)
    """Tasks of the split unseen, with operations in places where no training task has them. No decision uses them."""
    seed: int = Field(default=0, ge=0)
    """Seed that assigns names and compositions to splits and draws the tasks."""
    difficulty: DifficultyConfig | None = None
    """Training tasks by their difficulty; null: all."""

    @property
    def count(self) -> int:
        """Tasks of all splits."""
        return self.train + self.gate + self.held_out + self.unseen

    @classmethod
    def of_count(cls, count: int, seed: int = 0) -> Self:
        """`count` tasks in the default proportions. Raises TaskError below 8."""
        if count < 8:
            raise TaskError(f"a suite of {count} tasks can't fill four splits: ask for at least 8")
        gate, held_out, unseen = max(1, count // 6), max(1, count // 8), max(1, count // 16)
        return cls(train=count - gate - held_out - unseen, gate=gate, held_out=held_out, unseen=unseen, seed=seed)


class ImportedSuiteConfig(_Suite):
    """A suite in the experiment's store, made by `triplane tasks import` or `triplane tasks make`."""

    kind: Literal["import"]
    """Selects an imported suite; a generated suite has no kind."""
    suite: str = Field(pattern=r"^[0-9a-f]{8,64}$")
    """Digest of the task_suite artifact, or at least its first eight digits."""
    difficulty: DifficultyConfig | None = None
    """Training tasks by their difficulty; null: all."""


SuiteConfig = TaskSuiteConfig | ImportedSuiteConfig


def generate_tasks(config: TaskSuiteConfig) -> list[Task]:
    """All tasks, sorted by split (train, gate, held_out, unseen) and then by task_id."""
    counts = {
        Split.TRAIN: config.train,
        Split.GATE: config.gate,
        Split.HELD_OUT: config.held_out,
        Split.UNSEEN: config.unseen,
    }
    seen: set[str] = set()
    tasks = []
    for split, count in counts.items():
        bugs = draw_bugs(count, split, config.seed, Random(f"tasks/{config.seed}/{split.value}"), seen)
        tasks += sorted((make_task(bug, split) for bug in bugs), key=lambda task: task.task_id)
    return tasks


def make_task(bug: Bug, split: Split) -> Task:
    """Task to fix this bug. Its tests depend on the bug alone."""
    before, after = bug.modules(bug.wrong), bug.modules(bug.right)
    cases = draw_cases(bug.chain, Random(f"tests/{bug.identity}"))
    return Task(
        task_id=bug.task_id,
        family=bug.family,
        split=split,
        instruction=bug.instruction,
        files={
            **{path: text.encode() for path, text in before.items()},
            VISIBLE_TEST: visible_test(bug).encode(),
            "README.md": f"# {bug.paths[-1]}\n\nRun its tests with `python -m pytest`.\n".encode(),
        },
        hidden_files={HIDDEN_TEST: _hidden_test(bug, cases).encode()},
        tests=tuple(f"{HIDDEN_TEST}::{name}" for name in cases),
        reference_diff=file_diff(bug.path, before[bug.path], after[bug.path]),
        meta={
            "function": bug.functions[-1],
            "functions": list(bug.functions),
            "arguments": list(bug.arguments),
            "path": bug.path,
            "paths": list(bug.paths),
            "line": bug.line,
            "place": bug.place,
            "chain": [each.name for each in bug.chain],
            "right": bug.answer(bug.index, bug.right).strip(),
            "buggy": bug.answer(bug.index, bug.wrong).strip(),
            "wrong_operation": bug.wrong.name,
            "right_operation": bug.right.name,
        },
    )


def wrong_answers(task: Task) -> dict[str, bytes]:
    """Patches that put a wrong operation into the wrong line, by operation, for all wrong operations of the place."""
    path, number = str(task.meta["path"]), int(task.meta["line"])
    before = task.files[path].decode()
    lines = before.splitlines(keepends=True)
    right, symbol = str(task.meta["right"]), BY_NAME[task.meta["right_operation"]].symbol
    patches = {}
    for each in allowed(task.meta["place"]):
        if each.name == task.meta["right_operation"]:
            continue
        value, argument = right.rsplit(f" {symbol} ", 1)
        after = [*lines[: number - 1], f"    {value} {each.symbol} {argument}\n", *lines[number:]]
        patches[each.name] = file_diff(path, before, "".join(after)) if after != lines else b""
    return patches


def visible_test(bug: Bug) -> str:
    """Visible test file: one assertion, which the wrong line may pass by chance."""
    (case, *_), *_ = draw_cases(bug.chain, Random(f"visible/{bug.identity}")).values()
    check = assertion(bug.chain, bug.functions[-1], case)
    return f"{_import(bug)}\n\n\ndef test_visible():\n    {check}\n"


def _import(bug: Bug) -> str:
    return f"from {bug.paths[-1].removesuffix('.py')} import {bug.functions[-1]}"


def _hidden_test(bug: Bug, cases: dict[str, list[Case]]) -> str:
    head = (
        "import sys\nfrom pathlib import Path\n\nsys.path.insert(0, str(Path(__file__).parents[1]))\n\n"
        f"{_import(bug)}\n"
    )
    bodies = [
        f"\n\ndef {name}():\n" + "".join(f"    {assertion(bug.chain, bug.functions[-1], case)}\n" for case in test)
        for name, test in cases.items()
    ]
    return head + "".join(bodies)
