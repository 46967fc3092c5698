"""Tasks of a suite on disk: each with all its files, or as an overlay over a tree that many tasks share.

tasks.parquet  one row per task; an overlay has only the files that differ from its base, and names base and lacking
               paths in `meta`
trees.parquet  the bases, if there are any
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from contracts.artifacts import Artifact, ArtifactWriter
from contracts.errors import ArtifactCorrupt
from contracts.tasks import Task, files_digest, read_tasks, tasks_table

TREES = pa.schema([("tree", pa.string()), ("path", pa.string()), ("data", pa.binary())])
"""One row per file of a base, by the digest of the base's files and by path."""
_TASKS, _TREES, _OVERLAY = "tasks.parquet", "trees.parquet", "overlay"


def add_tasks(out: ArtifactWriter, tasks: Iterable[Task]) -> None:
    """Add tasks to a suite's artifact, those with a base as overlays. Without a base all bytes are as ever."""
    bases: dict[str, Mapping[str, bytes]] = {}
    rows = []
    for task in tasks:
        if task.base is not None:
            digest = files_digest(task.base)
            bases[digest] = task.base
            task = _overlay(task, task.base, digest)
        rows.append(task)
    out.add_table(_TASKS, tasks_table(rows))
    if bases:
        files = [
            {"tree": digest, "path": path, "data": data}
            for digest, base in sorted(bases.items())
            for path, data in sorted(base.items())
        ]
        out.add_table(_TREES, pa.Table.from_pylist(files, schema=TREES))


def read_suite(suite: Artifact) -> list[Task]:
    """Tasks of a suite, in its order; files that tasks share are one object in memory. Raises ArtifactCorrupt."""
    bases: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
    if _TREES in suite.names():
        for row in suite.table(_TREES).to_pylist():
            bases[row["tree"]][row["path"]] = row["data"]
    return [_whole(task, bases, suite) for task in read_tasks(suite.table(_TASKS))]


def _overlay(task: Task, base: Mapping[str, bytes], digest: str) -> Task:
    changed = {path: data for path, data in task.files.items() if path not in base or base[path] != data}
    lacking = sorted(base.keys() - task.files.keys())
    return replace(task, files=changed, meta=task.meta | {_OVERLAY: {"base": digest, "lacks": lacking}})


def _whole(task: Task, bases: Mapping[str, dict[str, bytes]], suite: Artifact) -> Task:
    overlay: dict[str, Any] | None = task.meta.get(_OVERLAY)
    if overlay is None:
        return task
    if overlay["base"] not in bases:
        raise ArtifactCorrupt(
            f"{suite.uri}: task {task.task_id} names the tree {overlay['base'][:12]}, which {_TREES} lacks: make the"
            " suite again"
        )
    base = bases[overlay["base"]]
    lacks = frozenset(overlay["lacks"])
    files = {path: data for path, data in base.items() if path not in lacks} | task.files
    meta = {key: value for key, value in task.meta.items() if key != _OVERLAY}
    return replace(task, files=files, meta=meta, base=base)
