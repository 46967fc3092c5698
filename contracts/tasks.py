"""Tasks as rows: a small git repository, an instruction, hidden tests and a reference fix."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pyarrow as pa

from contracts.digests import digest_of, sha256


class Split(StrEnum):
    """What may read a task: training, the promotion gate and stopping rules, or nothing but the report (held_out and unseen)."""

    TRAIN = "train"
    GATE = "gate"
    HELD_OUT = "held_out"
    UNSEEN = "unseen"


_FILE = pa.struct([("path", pa.string()), ("data", pa.binary())])

TASKS = pa.schema(
    [
        ("task_id", pa.string()),
        ("family", pa.string()),
        ("split", pa.string()),
        ("instruction", pa.string()),
        ("files", pa.list_(_FILE)),
        ("hidden_files", pa.list_(_FILE)),
        ("tests", pa.list_(pa.string())),
        ("reference_diff", pa.binary()),
        ("meta", pa.string()),
    ]
)
"""One row a task; `files` and `hidden_files` are sorted by path, `meta` is canonical JSON, with the task's artifacts if it declares any."""


_ARTIFACTS = "artifacts"


@dataclass(frozen=True)
class Task:
    """One thing to fix."""

    task_id: str
    family: str
    split: Split
    instruction: str
    """What the agent is told."""
    files: dict[str, bytes]
    """The repository the agent gets, visible tests included."""
    hidden_files: dict[str, bytes]
    """Test files placed only in the verifier's sandbox."""
    tests: tuple[str, ...]
    """Names of the hidden tests that must pass: pytest node ids relative to the repository."""
    reference_diff: bytes
    """A git-format diff that solves the task."""
    meta: dict[str, Any]
    """Facts of the task's maker, e.g. function name and arguments."""
    artifacts: tuple[str, ...] = ()
    """Patterns (contracts/patterns.py) of the files that count as the agent's work; none: all that it changes."""

    @property
    def image_digest(self) -> str:
        """Digest of what a sandbox of this task starts from."""
        return files_digest(self.files)

    @property
    def digest(self) -> str:
        """Digest of everything that decides how an episode of this task goes and is graded."""
        return digest_of(
            [
                self.task_id,
                self.instruction,
                self.image_digest,
                files_digest(self.hidden_files),
                list(self.tests),
                sha256(self.reference_diff),
                *([list(self.artifacts)] if self.artifacts else []),
            ]
        )


def files_digest(files: dict[str, bytes]) -> str:
    """Digest of a tree of files: H over the sorted (path, SHA-256) pairs."""
    return digest_of([[path, sha256(files[path])] for path in sorted(files)])


def tasks_table(tasks: list[Task]) -> pa.Table:
    """Rows of TASKS in the order given."""
    return pa.Table.from_pylist(
        [
            {
                "task_id": task.task_id, "family": task.family, "split": task.split.value, "instruction": task.instruction,
                "files": _file_rows(task.files), "hidden_files": _file_rows(task.hidden_files), "tests": list(task.tests),
                "reference_diff": task.reference_diff, "meta": _meta_row(task),
            }
            for task in tasks
        ],
        schema=TASKS,
    )  # fmt: skip


def read_tasks(table: pa.Table) -> list[Task]:
    """The inverse of `tasks_table`."""
    return [
        Task(
            task_id=row["task_id"], family=row["family"], split=Split(row["split"]), instruction=row["instruction"],
            files={file["path"]: file["data"] for file in row["files"]},
            hidden_files={file["path"]: file["data"] for file in row["hidden_files"]},
            tests=tuple(row["tests"]), reference_diff=row["reference_diff"], artifacts=tuple(meta.pop(_ARTIFACTS, ())), meta=meta,
        )
        for row in table.to_pylist()
        for meta in [json.loads(row["meta"])]
    ]  # fmt: skip


def _meta_row(task: Task) -> str:
    """The facts with the artifacts, which most tasks don't declare: a column for them would change every suite's digest."""
    return json.dumps(task.meta | ({_ARTIFACTS: list(task.artifacts)} if task.artifacts else {}), sort_keys=True)


def _file_rows(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [{"path": path, "data": files[path]} for path in sorted(files)]
