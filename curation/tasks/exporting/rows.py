"""SWE-bench rows: instances.jsonl, and clones/ with a bare repository for each `repo`.

triplane tasks import OUT/instances.jsonl --repos OUT/clones
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curation.tasks.exporting.prepare import Prepared
from curation.tasks.exporting.repositories import write_repository

ROWS, CLONES = "instances.jsonl", "clones"


def write_rows(folder: Path, prepared: Sequence[Prepared], version: str) -> None:
    """Write rows and clones. version: the suite's short digest, as SWE-bench's `version` of the repository."""
    commits: dict[str, str] = {}
    for repo in sorted({each.repo for each in prepared}):
        trees = {each.task.task_id: each.task.files for each in prepared if each.repo == repo}
        commits |= write_repository(folder / CLONES / f"{repo.replace('/', '__')}.git", trees)
    rows = (_row(each, commits[each.task.task_id], version) for each in prepared)
    text = "".join(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows)
    (folder / ROWS).write_text(text, encoding="utf-8", newline="")


def _row(each: Prepared, commit: str, version: str) -> dict[str, Any]:
    task = each.task
    declared: dict[str, Any] = {"deliverables": list(task.deliverables)} if task.deliverables else {}
    if task.environment.to_values():
        declared["triplane_environment"] = task.environment.to_values()
    return {
        "instance_id": task.task_id,
        "repo": each.repo,
        "base_commit": commit,
        "environment_setup_commit": commit,
        "problem_statement": task.instruction,
        "hints_text": "",
        "patch": each.patch,
        "test_patch": each.test_patch,
        "FAIL_TO_PASS": each.fail_to_pass,
        "PASS_TO_PASS": each.pass_to_pass,
        "version": version,
        "split": each.split.value,
        **declared,
    }
