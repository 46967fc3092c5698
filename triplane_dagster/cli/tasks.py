"""`triplane tasks`: build, make or import a task suite, list, show, prove and rate its tasks, run an agent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from contracts.artifacts import Artifact
from contracts.errors import TriplaneError
from contracts.final_states import state_values
from contracts.store import open_store
from contracts.tasks import Split
from contracts.visible import visible
from triplane_dagster.cli import tasks_difficulty, tasks_export, tasks_make, tasks_own, tasks_runtimes
from triplane_dagster.cli.experiments import find_experiment
from triplane_dagster.cli.options import AsJson, ExperimentName, Limit, Overrides
from triplane_dagster.cli.output import cell, console, print_json, print_rows
from triplane_dagster.cli.suites import OfSuite, chosen_suite

if TYPE_CHECKING:
    from curation.tasks.validate import ValidationReport

app = typer.Typer(
    no_args_is_help=True,
    help="Build, make or import a task suite; list, show and prove its tasks; run an agent on them.",
)

OfSplit = Annotated[Split | None, typer.Option("--split", help="Only tasks of this split.")]


@app.command()
def build(
    experiment: ExperimentName = "quickstart",
    overrides: Overrides = None,
    count: Annotated[
        int | None, typer.Option(min=6, help="Number of tasks, in the default proportions of the splits.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Build an experiment's task suite and prove every task in sandboxes. A suite that exists is reused.

    Examples:

        triplane tasks build

        triplane tasks build --count 2000 --set tasks.seed=7
    """
    from curation.tasks.build import build_suite
    from curation.tasks.suite import TaskSuiteConfig
    from resources.progress import Progress
    from resources.sandboxes import SandboxesResource
    from triplane_dagster.cli.bars import Bars

    wanted, sandboxes = find_experiment(experiment, overrides), SandboxesResource()
    config = TaskSuiteConfig.of_count(count, wanted.demonstrated.seed) if count else wanted.tasks

    async def make(bars: Bars) -> Artifact:
        async with sandboxes.client(wanted.sandboxes) as client:
            return await build_suite(
                config,
                open_store(),
                client,
                lambda done, total: bars(Progress("task_suite", None, "validating", done, total)),
            )

    try:
        with Bars() as bars:
            suite = asyncio.run(make(bars))
    finally:
        sandboxes.close()
    if as_json:
        print_json({**suite.ref.model_dump(), **suite.meta})
    else:
        console().print(f"task suite {suite.ref.short}: {cell(suite.meta)}", soft_wrap=True)


@app.command("list")
def list_tasks(
    experiment: ExperimentName = "quickstart",
    overrides: Overrides = None,
    split: OfSplit = None,
    family: Annotated[str | None, typer.Option(help="Only tasks of this family of bugs.")] = None,
    limit: Limit = 20,
    suite: OfSuite = None,
    as_json: AsJson = False,
) -> None:
    """List the tasks of an experiment's suite.

    Example:

        triplane tasks list --split held_out --family inner-plus
    """
    from curation.tasks.inspect import suite_tasks, task_rows

    found = chosen_suite(open_store(), find_experiment(experiment, overrides), suite)
    rows = task_rows(suite_tasks(found, split), family)
    title = f"task suite {found.ref.short}: {min(limit, len(rows))} of {len(rows)} tasks"
    print_rows(rows[:limit], as_json=as_json, title=title, empty="no matching task")


@app.command()
def show(
    task: Annotated[str, typer.Argument(help="Task id or an unambiguous prefix of it.")],
    experiment: ExperimentName = "quickstart",
    overrides: Overrides = None,
    suite: OfSuite = None,
    as_json: AsJson = False,
) -> None:
    """Show one task: instruction, repository, hidden tests, reference fix.

    Example:

        triplane tasks show inner-plus-77
    """
    from curation.tasks.inspect import find_task, suite_tasks, task_text

    tasks = suite_tasks(chosen_suite(open_store(), find_experiment(experiment, overrides), suite))
    found = find_task(tasks, task)
    if not as_json:
        typer.echo(visible(task_text(found)), nl=False)
        return
    print_json(
        {
            "task_id": found.task_id,
            "split": found.split.value,
            "family": found.family,
            "instruction": found.instruction,
            "files": {path: data.decode(errors="replace") for path, data in found.files.items()},
            "hidden_files": {path: data.decode(errors="replace") for path, data in found.hidden_files.items()},
            "tests": list(found.tests),
            "reference_diff": found.reference_diff.decode(errors="replace"),
            "meta": found.meta,
            **({"artifacts": list(found.deliverables)} if found.deliverables else {}),
            **({"toolset": found.toolset} if found.toolset else {}),
            **({"final_state": state} if (state := state_values(found.final_state)) else {}),
            "digest": found.digest,
            "image_digest": found.files_digest,
        }
    )


@app.command()
def check(
    experiment: ExperimentName = "quickstart",
    overrides: Overrides = None,
    split: OfSplit = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most this many tasks.")] = 1_000_000,
    suite: OfSuite = None,
    as_json: AsJson = False,
) -> None:
    """Prove an existing suite again: tests fail before the fix and pass after it; cheats and wrong answers score
    nothing.

    Example:

        triplane tasks check --split gate
    """
    from curation.tasks.inspect import suite_tasks
    from curation.tasks.validate import validate_tasks
    from resources.progress import Progress
    from resources.sandboxes import SandboxesResource
    from triplane_dagster.cli.bars import Bars

    wanted, sandboxes = find_experiment(experiment, overrides), SandboxesResource()
    tasks = list(suite_tasks(chosen_suite(open_store(), wanted, suite), split).values())[:limit]

    async def prove(bars: Bars) -> ValidationReport:
        async with sandboxes.client(wanted.sandboxes) as client:
            report, _ = await validate_tasks(
                tasks, client, lambda done, total: bars(Progress("task_suite", None, "validating", done, total))
            )
            return report

    try:
        with Bars() as bars:
            report = asyncio.run(prove(bars))
    finally:
        sandboxes.close()
    fooled = [cheat for cheat in report.cheats if cheat.solved]
    if as_json:
        print_json(report.model_dump(mode="json"))
    else:
        console().print(
            f"{report.tasks} tasks: {len(report.broken)} broken; {len(report.cheats)} cheats tried, {len(fooled)}"
            f" passed; {report.wrong_answers} wrong answers tried; {report.decoys} decoys, {report.observed} tests"
            f" observed, {sum(map(len, report.undecided.values()))} tests admit neither",
            soft_wrap=True,
        )
    if report.broken or fooled:
        first = report.broken[0] if report.broken else None
        raise TriplaneError(
            f"{len(report.broken)} tasks are broken"
            + (f", first {first.task_id}: {first.reason}" if first else "")
            + (f"; the cheat {fooled[0].cheat} passes {fooled[0].task_id}" if fooled else "")
        )


app.command()(tasks_make.make)
app.command("import")(tasks_own.import_tasks)
app.command()(tasks_runtimes.runtime)
app.command()(tasks_runtimes.image)
app.command()(tasks_own.run)
app.command()(tasks_difficulty.difficulty)
app.command()(tasks_export.export)
