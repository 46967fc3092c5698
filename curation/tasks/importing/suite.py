"""Import a suite: read tasks, prove them in sandboxes, assign splits, publish the `task_suite` artifact."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from contracts.artifacts import Artifact, ArtifactWriter, find_artifact
from contracts.digests import action_key, digest_of
from contracts.store import Store
from contracts.suites import add_tasks
from contracts.tasks import Split, Task
from curation.errors import TaskError
from curation.tasks.importing.copies import without_copies
from curation.tasks.importing.folder import read_folder
from curation.tasks.importing.harbor import is_harbor, read_harbor
from curation.tasks.importing.reading import Reading
from curation.tasks.importing.splits import DEFAULT_SHARES, deal
from curation.tasks.importing.swebench import read_rows
from curation.tasks.validate import Progress, ValidationReport, validate_tasks
from envd.client import SandboxClient
from envd.tools import DEFAULT_TOOLSET, toolset_named

IMPORT_SUITE_VERSION = "6"


def read_source(source: Path, repos: Path | None = None, toolset: str = "") -> Reading:
    """The tasks of a folder or a JSONL file.

    repos: clones for the latter, by default beside it. toolset: of tasks that name none. Raises TaskError, EnvdError.
    """
    wanted = toolset_named(toolset).name
    if source.is_dir() and not is_harbor(source):
        return read_folder(source, toolset)
    reading = _read(source, repos)
    if wanted != DEFAULT_TOOLSET:
        reading.tasks[:] = [dataclasses.replace(each, toolset=wanted) for each in reading.tasks]
    return reading


def _read(source: Path, repos: Path | None) -> Reading:
    if source.is_dir():
        return read_harbor(source)
    if source.is_file():
        return read_rows(source, repos or source.parent)
    raise TaskError(
        f"{source} does not exist: give a folder of repositories with task.yaml or of Harbor tasks, or a .jsonl file"
    )


async def import_suite(
    reading: Reading,
    shares: Mapping[Split, float],
    store: Store,
    client: SandboxClient,
    progress: Progress | None = None,
) -> Artifact:
    """Prove and publish the tasks, or return the existing suite. Broken tasks are left out and named in
    validation.json.

    Raises TaskError if no task is left. An interrupted import resumes.
    """
    config = {
        "kind": "import",
        "tasks": _digest(reading),
        "shares": {split.value: shares.get(split, 0) for split in DEFAULT_SHARES},
    }
    key = action_key("task_suite", {}, config, IMPORT_SUITE_VERSION)
    found = find_artifact(store, "task_suite", key)
    if found is not None:
        return found
    reading = await asyncio.to_thread(without_copies, reading, store)
    proved, sound = await validate_tasks(reading.tasks, client, progress, store=store)
    broken = sorted([*reading.broken, *proved.broken], key=lambda each: each.task_id)
    report = proved.model_copy(update={"tasks": proved.tasks + len(reading.broken), "broken": broken})
    tasks = _dealt(sound, reading.wishes, shares)
    if not tasks:
        first = f"first {broken[0].task_id}: {broken[0].reason}" if broken else "the source holds none"
        raise TaskError(f"all {report.tasks} tasks are broken, nothing was imported; {first}")
    splits = Counter(task.split.value for task in tasks)
    meta = {
        "tasks": len(tasks),
        "broken": len(broken),
        "families": report.families,
        "splits": {split.value: splits[split.value] for split in DEFAULT_SHARES},
    }
    with ArtifactWriter(store, "task_suite", key, parents={}, config=config, code_version=IMPORT_SUITE_VERSION) as out:
        add_tasks(out, tasks)
        out.add_json("validation.json", report.model_dump())
        return out.commit(meta=meta)


def suite_report(suite: Artifact) -> ValidationReport:
    """Validation report stored in the suite."""
    return ValidationReport.model_validate(suite.json("validation.json"))


def _dealt(tasks: list[Task], wishes: Mapping[str, Split], shares: Mapping[Split, float]) -> list[Task]:
    """`tasks` by split and id."""
    places = deal([task.task_id for task in tasks if task.task_id not in wishes], shares) | dict(wishes)
    placed = [dataclasses.replace(task, split=places[task.task_id]) for task in tasks]
    return sorted(placed, key=lambda task: (list(Split).index(task.split), task.task_id))


def _digest(reading: Reading) -> str:
    tasks = [[task.digest, task.family, task.meta, reading.wishes.get(task.task_id)] for task in reading.tasks]
    return digest_of([tasks, [each.model_dump() for each in reading.broken]])
