"""`triplane tasks export`: a suite as SWE-bench rows or as Harbor task folders."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from contracts.errors import TriplaneError
from contracts.store import open_store
from contracts.tasks import Split
from triplane_dagster.cli.experiments import find_experiment
from triplane_dagster.cli.options import AsJson, ExperimentName
from triplane_dagster.cli.output import console, print_json, print_rows
from triplane_dagster.cli.suites import OfSuite, chosen_suite

if TYPE_CHECKING:
    from contracts.artifacts import Artifact
    from contracts.tasks import Task
    from curation.tasks.exporting.prepare import Prepared
    from curation.tasks.validate import BrokenTask
    from resources.experiment import Experiment
    from triplane_dagster.cli.bars import Bars


def export(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; it must not exist, or be empty.")],
    kind: Annotated[
        Literal["swebench", "harbor"],
        typer.Option("--format", help="swebench: instances.jsonl and clones/. harbor: a folder for each task."),
    ],
    suite: OfSuite = None,
    experiment: ExperimentName = "quickstart",
    split: Annotated[Split | None, typer.Option("--split", help="Only tasks of this split.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a suite's tasks for other projects. `triplane tasks import` reads both formats.

    The folder appears when everything is written. It holds solutions and hidden tests: keep it from agents.

    Examples:

        triplane tasks export --suite 0a1b2c3d4e5f --format swebench --out rows/

        triplane tasks export --suite 0a1b2c3d4e5f --format harbor --split held_out --out harbor-tasks/
    """
    from curation.tasks.exporting.folder import new_folder
    from curation.tasks.inspect import suite_tasks

    wanted, store = find_experiment(experiment), open_store()
    chosen = chosen_suite(store, wanted, suite)
    tasks = list(suite_tasks(chosen, split).values())
    if not tasks:
        raise TriplaneError(f"task suite {chosen.ref.short} has no task in split {split}: choose another")
    with new_folder(out) as folder:
        prepared, broken = _prepare(tasks, chosen, wanted)
        if not prepared:
            raise TriplaneError(f"no task can be written as {kind}: {broken[0].task_id}: {broken[0].reason}")
        _write(kind, folder, prepared, chosen)
    left_out = [each.model_dump() for each in broken]
    if as_json:
        counts = {"tasks": len(prepared), "broken": left_out}
        print_json({"suite": chosen.ref.digest, "format": kind, "out": str(out), **counts})
        return
    if left_out:
        print_rows(left_out, as_json=False, title=f"{len(left_out)} left out")
    source = f"{out}/instances.jsonl --repos {out}/clones" if kind == "swebench" else f"{out}"
    console().print(f"{len(prepared)} tasks in {out}; read them with `triplane tasks import {source}`", soft_wrap=True)


def _prepare(tasks: list[Task], suite: Artifact, experiment: Experiment) -> tuple[list[Prepared], list[BrokenTask]]:
    from curation.tasks.exporting.prepare import prepare
    from curation.verify import Verifier
    from resources.progress import Progress
    from resources.sandboxes import SandboxesResource
    from triplane_dagster.cli.bars import Bars

    sandboxes = SandboxesResource()

    async def read(bars: Bars) -> tuple[list[Prepared], list[BrokenTask]]:
        async with sandboxes.client(experiment.sandboxes) as client:
            return await prepare(
                tasks,
                suite.ref.short,
                Verifier(client, suite.store),
                lambda done, total: bars(Progress("export", None, "reading", done, total)),
            )

    try:
        with Bars() as bars:
            return asyncio.run(read(bars))
    finally:
        sandboxes.close()


def _write(kind: str, folder: Path, prepared: list[Prepared], suite: Artifact) -> None:
    from curation.tasks.exporting.harbor import write_folders
    from curation.tasks.exporting.packages import packages_of
    from curation.tasks.exporting.rows import write_rows

    if kind == "swebench":
        write_rows(folder, prepared, suite.ref.short)
    else:
        write_folders(folder, prepared, suite.ref.digest, lambda runtime: packages_of(suite.store, runtime))
