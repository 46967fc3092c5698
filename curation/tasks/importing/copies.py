"""Copies of the solution in what a task runs in: a fixed file that its runtime holds."""

from __future__ import annotations

import dataclasses
import tarfile
from collections import defaultdict

from contracts.digests import sha256
from contracts.runtimes import runtime_archive
from contracts.store import Store
from contracts.tasks import Task
from curation.errors import TaskError
from curation.tasks.importing.reading import Reading
from curation.tasks.importing.trees import patched_tree
from curation.tasks.validate import BrokenTask

_LEAST = 32
"""Smallest fixed file, in bytes, that is looked for: empty ones and the like are everywhere."""


def without_copies(reading: Reading, store: Store) -> Reading:
    """The reading without the tasks whose runtime, such as an image with the repository in it, holds a fixed file.

    Raises ArtifactMissing if the store lacks a runtime.
    """
    broken: dict[str, str] = {}
    by_runtime = defaultdict[str, list[Task]](list)
    for task in reading.tasks:
        if task.environment.runtime:
            by_runtime[task.environment.runtime].append(task)
    for runtime, tasks in by_runtime.items():
        wanted = defaultdict[tuple[int, str], list[tuple[str, str]]](list)
        for task in tasks:
            for path, content in _fixed(task).items():
                wanted[len(content), sha256(content)].append((task.task_id, path))
        sizes = {size for size, _ in wanted}
        with tarfile.open(runtime_archive(store, runtime)) as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isreg() and member.size in sizes else None
                for task_id, path in wanted.get((member.size, sha256(file.read())), ()) if file else ():
                    broken.setdefault(
                        task_id,
                        f"its runtime holds the fixed {path} as /{member.name}: make it again without that"
                        " (`triplane tasks image --leave-out`)",
                    )
    left_out = [BrokenTask(task_id=task_id, reason=reason) for task_id, reason in broken.items()]
    kept = [task for task in reading.tasks if task.task_id not in broken]
    return dataclasses.replace(reading, tasks=kept, broken=[*reading.broken, *left_out])


def _fixed(task: Task) -> dict[str, bytes]:
    """Files that the reference changes or adds, as it leaves them."""
    if not task.reference_diff:
        return {}
    try:
        after = patched_tree(task.files, task.reference_diff, "its reference")
    except TaskError:
        return {}  # its proof names that
    return {
        path: content for path, content in after.items() if content != task.files.get(path) and len(content) >= _LEAST
    }
