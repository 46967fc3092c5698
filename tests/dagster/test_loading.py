"""A suite's tasks are parsed once, and its file is checked each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.artifacts import Artifact, ArtifactWriter
from contracts.digests import digest_of
from contracts.errors import ArtifactCorrupt
from contracts.store import Store, open_store
from contracts.tasks import Split, Task, tasks_table
from ops.loading import load_tasks


def suite_of(store: Store, *names: str) -> Artifact:
    tasks = [
        Task(name, "family", Split.TRAIN, "repair it", {"a.py": b"1"}, {"t.py": b"2"}, ("t.py::test",), b"diff", {})
        for name in names
    ]
    with ArtifactWriter(store, "task_suite", digest_of([*names]), parents={}, config={}, code_version="1") as out:
        out.add_table("tasks.parquet", tasks_table(tasks))
        return out.commit()


def test_tasks_are_those_of_the_suite_whichever_was_read_before(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    one, two = suite_of(store, "a", "b"), suite_of(store, "c")
    assert [*load_tasks(store, one.ref)] == ["a", "b"] and load_tasks(store, one.ref) is load_tasks(store, one.ref)
    assert [*load_tasks(store, two.ref)] == ["c"] and [*load_tasks(store, one.ref)] == ["a", "b"]
    assert load_tasks(store, one.ref)["a"].digest != load_tasks(store, one.ref)["b"].digest


def test_a_suite_that_was_damaged_after_it_was_read_is_refused(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    suite = suite_of(store, "a")
    load_tasks(store, suite.ref)
    path = suite.path("tasks.parquet")
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ArtifactCorrupt, match="does not match its manifest"):
        load_tasks(store, suite.ref)
