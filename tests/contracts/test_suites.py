"""Suites whose tasks share a tree."""

import dataclasses
import os
from pathlib import Path

from contracts.artifacts import Artifact, ArtifactWriter
from contracts.store import open_store
from contracts.suites import add_tasks, read_suite
from contracts.tasks import Split, Task

TREE = {f"pkg/m{n}.py": os.urandom(10_000).hex().encode() for n in range(256)}
"""Five megabytes that hardly compress to less than half."""


def derived(number: int) -> Task:
    path = f"pkg/m{number % 256}.py"
    files = {**TREE, path: f"bug = {number}\n".encode()}
    del files[f"pkg/m{(number + 1) % 256}.py"]
    return Task(
        task_id=f"t{number}",
        family="f",
        split=Split.TRAIN,
        instruction="Mend it.",
        files=files,
        hidden_files={},
        tests=("tests/test_a.py::test_a",),
        reference_diff=b"",
        meta={"path": path},
        base=TREE,
    )


def stored(tasks: list[Task], root: Path) -> Artifact:
    with ArtifactWriter(open_store(str(root)), "task_suite", "0" * 64, parents={}, config={}, code_version="1") as out:
        add_tasks(out, tasks)
        return out.commit()


def test_tasks_of_a_shared_tree_are_stored_once_and_read_back_with_their_digests(tmp_path: Path) -> None:
    tasks = [derived(number) for number in range(1000)]
    suite = stored(tasks, tmp_path)
    read = read_suite(suite)
    assert read == tasks and [each.digest for each in read] == [each.digest for each in tasks]
    assert all(each.base == TREE for each in read)
    assert read[0].files["pkg/m9.py"] is read[1].files["pkg/m9.py"]  # one object in memory
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size < 3 * sum(map(len, TREE.values())) + 1000 * 4096


def test_task_without_a_base_is_stored_as_ever(tmp_path: Path) -> None:
    whole = dataclasses.replace(derived(1), base=None)
    (read,) = read_suite(stored([whole], tmp_path))
    assert read == whole == derived(1) and read.base is None
    assert whole.digest == derived(1).digest
    assert stored([whole], tmp_path).names() == ["tasks.parquet"]
