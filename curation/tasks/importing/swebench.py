"""SWE-bench style rows over local clones: one JSON object per line, with a repository's commit, a fix and its tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from curation.errors import TaskError
from curation.tasks.importing.interactions import as_instance, is_interaction
from curation.tasks.importing.reading import (
    DELIVERABLES,
    Reading,
    Source,
    TestNames,
    check_tests,
    environment_of,
    faults_of,
    task_of,
    whole_characters,
)
from curation.tasks.importing.splits import ImportedSplit
from curation.tasks.importing.trees import commit_tree, patched_tree
from curation.tasks.validate import BrokenTask


class Row(BaseModel):
    """One instance in the format of SWE-bench and its descendants; further keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    instance_id: str = Field(min_length=1)
    """Id of the task."""
    repo: str = Field(min_length=1, max_length=200)
    """owner/name."""
    base_commit: str = Field(pattern=r"^[0-9a-fA-F]{7,64}$")
    """Commit that the agent starts from."""
    patch: str
    """The fix."""
    test_patch: str = ""
    """Grading adds the files that it changes, in their new version; the agent does not see them."""
    problem_statement: str = Field(min_length=1)
    """Instructions for the agent."""
    FAIL_TO_PASS: TestNames
    """Node ids that fail before the fix and pass after it."""
    PASS_TO_PASS: TestNames = []
    """Node ids that must still pass after the fix."""
    split: ImportedSplit | None = None
    """Split of the task; default: assigned by share."""
    deliverables: tuple[str, ...] = Field(default=(), validation_alias=DELIVERABLES)
    """Patterns, as in `.gitignore`, of the files that count as the agent's work; empty: all changed files."""
    triplane_environment: dict[str, Any] = {}
    """Packages, test settings and limits (docs/tasks.md), as `triplane tasks export` writes them."""
    conversation: str | None = None
    """Digest of the source interaction, if any."""


def read_rows(file: Path, repos: Path) -> Reading:
    """The tasks of a JSONL file. repos: the directory with the clones.

    Raises TaskError if the file is damaged.
    """
    reading, seen = Reading(), set[str]()
    for number, line in enumerate(_lines(file), 1):
        if not line.strip():
            continue
        values = _values(line, file, number)
        name = str(values.get("instance_id") or values.get("interaction_id") or f"line {number}")
        try:
            if name in seen:
                raise TaskError(f"line {number} has the instance_id of an earlier line: give it another")
            seen.add(name)
            with whole_characters():
                row = _row(as_instance(values) if is_interaction(values) else values)
                reading.tasks.append(task_of(_source(row, repos)))
        except TaskError as error:
            reading.broken.append(BrokenTask(task_id=name, reason=str(error)))
            continue
        if row.split is not None:
            reading.wishes[name] = row.split
    return reading


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise TaskError(f"{file} is not UTF-8 (byte {error.start}): write it as JSON, one object a line") from None


def _values(line: str, file: Path, number: int) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"{file} line {number} is not JSON ({error}): write one whole object a line") from None
    if not isinstance(values, dict):
        raise TaskError(f"{file} line {number} is not an object but {type(values).__name__}: write one instance a line")
    return values


def _row(values: dict[str, Any]) -> Row:
    try:
        return Row.model_validate(values)
    except ValidationError as error:
        raise TaskError(f"its row is wrong at {faults_of(error)}") from None


def _source(row: Row, repos: Path) -> Source:
    tests = check_tests([*row.FAIL_TO_PASS, *row.PASS_TO_PASS], "FAIL_TO_PASS")
    if not row.FAIL_TO_PASS:
        raise TaskError("its FAIL_TO_PASS is empty: name at least one test that the fix makes pass")
    before = commit_tree(_clone(row.repo, repos), row.base_commit)
    fixed = patched_tree(before, row.patch.encode(), "patch")
    after = patched_tree(before, row.test_patch.encode(), "test_patch")
    return Source(
        task_id=row.instance_id,
        family=row.repo,
        instruction=row.problem_statement,
        before=before,
        after_tests=after,
        fixed=fixed,
        hidden=frozenset(),
        placed=frozenset(path for path, data in after.items() if before.get(path) != data),
        tests=tests,
        reference=row.patch.encode(),
        deliverables=row.deliverables,
        environment=environment_of(row.triplane_environment),
        meta={
            "repo": row.repo,
            "base_commit": row.base_commit,
            "fail_to_pass": row.FAIL_TO_PASS,
            "pass_to_pass": row.PASS_TO_PASS,
            **({"conversation": row.conversation} if row.conversation else {}),
        },
    )


def _clone(repo: str, repos: Path) -> Path:
    owner, _, name = repo.rpartition("/")
    names = [repo, f"{owner}__{name}", name]
    for candidate in (repos / (each + ending) for each in names for ending in ("", ".git")):
        if (candidate / ".git").exists() or (candidate / "HEAD").is_file():
            return candidate
    raise TaskError(
        f"{repos} holds no clone of {repo}: clone it there as {names[1] if owner else name}, or name its folder by"
        " --repos"
    )
