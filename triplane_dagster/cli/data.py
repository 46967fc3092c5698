"""`triplane data`: run data pipelines, and list what they made."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from contracts.errors import ConfigError
from contracts.leftovers import sweep_once
from contracts.store import open_store
from triplane_dagster.cli.bars import Bars
from triplane_dagster.cli.interrupts import stoppable
from triplane_dagster.cli.options import AsJson, Limit
from triplane_dagster.cli.output import print_json, print_rows

if TYPE_CHECKING:
    from curation.pipeline.versions import Version

app = typer.Typer(no_args_is_help=True, help="Prepare tables of data in stages, and store them by version.")


@app.command()
def run(
    pipeline: Annotated[
        str, typer.Argument(metavar="PIPELINE", help="Name of a file in experiments/data/, or the path of a YAML file.")
    ],
    workers: Annotated[
        int | None, typer.Option(min=1, help="Worker processes; default: the file's number, else one per core.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check the file and print its columns.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run a pipeline: rows from its source through its stages into a new version of its data.

    A killed command goes on where it was. With the same file and input nothing runs.

    Examples:

        triplane data run code_chats

        triplane data run ./code_chats.yaml --dry-run
    """
    from curation.pipeline.plan import plan_pipeline
    from curation.pipeline.runner import run_pipeline
    from curation.pipeline.versions import record_version
    from resources.data_pipeline import load_pipeline
    from resources.progress import Progress
    from triplane_dagster.experiment_files import pipelines_folder

    path = Path(pipeline) if pipeline.endswith((".yaml", ".yml")) else pipelines_folder() / f"{pipeline}.yaml"
    settings = load_pipeline(path)
    if workers is not None:
        settings = settings.model_copy(update={"workers": workers})
    store = open_store()
    with stoppable():
        plan = plan_pipeline(settings, path.resolve().parent)
        if dry_run:
            steps = [step for segment in plan.segments for step in segment.steps]
            schemas = [("source", plan.reader.schema), *((step.place, step.after) for step in steps)]
            rows = [{"stage": name, "columns": {each.name: str(each.type) for each in of}} for name, of in schemas]
            print_rows(rows, as_json=as_json, title=f"{settings.name}, key {plan.key[:12]} (nothing was run)")
            return
        sweep_once(store)
        with Bars() as bars:
            made = run_pipeline(
                plan,
                store,
                lambda phase, done, total, rate: bars(
                    Progress(settings.name, None, phase, done, total, {"rows_per_second": rate})
                ),
            )
        _show(record_version(store, settings.name, made), as_json=as_json)


@app.command("list")
def list_versions(
    name: Annotated[str | None, typer.Argument(metavar="PIPELINE", help="Only versions of this pipeline.")] = None,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List versions of data in the store, the newest of each pipeline first."""
    from curation.pipeline.versions import versions

    found = sorted(versions(open_store(), name), key=lambda each: (each.name, -each.number))[:limit]
    print_rows([_row(each) for each in found], as_json=as_json, empty="no data: triplane data run PIPELINE makes some")


@app.command()
def show(
    version: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="Such as code_chats, or code_chats@3.")],
    as_json: AsJson = False,
) -> None:
    """Show a version: its folder of Parquet files, and the rows in and out of each stage."""
    from curation.pipeline.versions import find_version

    _show(find_version(open_store(), version), as_json=as_json)


@app.command()
def names(as_json: AsJson = False) -> None:
    """List the pipelines: files in experiments/data/."""
    from resources.data_pipeline import load_pipeline
    from triplane_dagster.experiment_files import pipelines_folder

    rows = []
    for path in sorted(pipelines_folder().glob("*.yaml")):
        try:
            each = load_pipeline(path)
        except ConfigError as error:
            typer.echo(f"warning: {error}", err=True)
            continue
        rows.append({"name": each.name, "stages": len(each.stages), "description": each.description})
    print_rows(rows, as_json=as_json, empty=f"no pipeline in {pipelines_folder()}: docs/data.md shows how to write one")


def _row(version: Version) -> dict[str, Any]:
    artifact = version.artifact
    return {
        "version": str(version),
        "digest": artifact.ref.digest,
        "rows": artifact.meta["rows"],
        "files": len(artifact.names()),
        "bytes": sum(each.size for each in artifact.manifest.files),
        "when (UTC)": datetime.fromtimestamp(artifact.manifest.created_unix, UTC).strftime("%Y-%m-%d %H:%M"),
    }


def _show(version: Version, *, as_json: bool) -> None:
    artifact = version.artifact
    if as_json:
        print_json({**_row(version), "folder": str(artifact.directory()), **artifact.meta})
        return
    print_rows(artifact.meta["stages"], as_json=False, title=f"{version}, digest {artifact.ref.short}")
    typer.echo(artifact.directory())
