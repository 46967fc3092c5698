"""Views of a suite: its tasks as rows, one task as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches

from contracts.artifacts import Artifact
from contracts.final_states import state_values
from contracts.suites import read_suite
from contracts.tasks import Split, Task
from curation.errors import TaskError


def suite_tasks(suite: Artifact, split: Split | None = None) -> dict[str, Task]:
    """Tasks of a `task_suite` artifact by id, in its order. split: only tasks of this split."""
    tasks = read_suite(suite)
    return {task.task_id: task for task in tasks if split is None or task.split == split}


def task_rows(tasks: Mapping[str, Task], family: str | None = None) -> list[dict[str, str]]:
    """One row per task, for a table or `--json`. family: only tasks of this family."""
    return [
        {"task_id": task.task_id, "split": task.split.value, "family": task.family, "instruction": task.instruction}
        for task in tasks.values()
        if family in (None, task.family)
    ]


def find_task(tasks: Mapping[str, Task], task_id: str) -> Task:
    """The task with this id or unambiguous prefix. Raises TaskError with similar ids."""
    if task_id in tasks:
        return tasks[task_id]
    matches = [name for name in tasks if name.startswith(task_id)]
    if len(matches) == 1:
        return tasks[matches[0]]
    near = matches[:3] or get_close_matches(task_id, tasks, n=3, cutoff=0)
    raise TaskError(
        f"{task_id!r} matches no single task of the suite: did you mean {', '.join(near) or 'another suite'}?"
    )


def task_text(task: Task) -> str:
    """Description of a task: instruction, deliverables, repository, hidden tests, reference fix."""
    parts = [f"{task.task_id} ({task.split.value}, {task.family})", task.instruction]
    if task.deliverables:
        parts.append(f"--- deliverables: {' '.join(task.deliverables)}")
    if task.toolset:
        parts.append(f"--- toolset: {task.toolset}")
    if state := state_values(task.final_state):
        parts.append(f"--- final state: {json.dumps(state, sort_keys=True, ensure_ascii=False)}")
    parts += [f"--- {path}\n{data.decode(errors='replace')}" for path, data in sorted(task.files.items())]
    parts += [
        f"--- hidden: {path}\n{data.decode(errors='replace')}" for path, data in sorted(task.hidden_files.items())
    ]
    if task.reference_diff:
        parts.append(f"--- reference fix\n{task.reference_diff.decode(errors='replace')}")
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"
