"""`triplane report`: show an iteration as one HTML page."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from contracts.errors import ArtifactMissing
from contracts.store import Store, open_store
from triplane_dagster.cli.experiments import name_in_store
from triplane_dagster.cli.options import ExperimentName
from triplane_dagster.cli.output import write_page
from triplane_dagster.cli.stale import stale_lines


def report(
    experiment: ExperimentName = "quickstart",
    iteration: Annotated[
        str, typer.Option("--iteration", "-i", help="Iteration key such as 0003; default: the last with rollouts.")
    ] = "",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the page to this file.")] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the web browser.")] = False,
) -> None:
    """Print the path of an iteration's report: curves, distributions, costs and every episode, in one file.

    The asset `report` makes the page. For an unfinished iteration, this command makes a page from the existing
    artifacts.

    Examples:

        triplane report --open                         # the last iteration's, in the browser

        triplane report -i 0003 --output page.html     # a file to send: it needs no network
    """
    store = open_store()
    experiment = name_in_store(store, experiment)
    wanted = iteration or _last(store, experiment)
    for line in stale_lines(store, experiment):
        typer.echo(line, err=True)
    page = _materialized(store, experiment, wanted)
    if page is None:
        page = write_page(output or Path(f"{experiment}-{wanted}.html"), _drawn(store, experiment, wanted))
        typer.echo(
            f"{experiment} {wanted} has no report yet: this page shows existing artifacts, without durations", err=True
        )
    elif output is not None:
        page = write_page(output, page.read_bytes())
    typer.echo(page.absolute())
    if show and not webbrowser.open(page.absolute().as_uri()):
        typer.echo("no web browser found: open the file above in one", err=True)


def _last(store: Store, experiment: str) -> str:
    from resources.refs import partitions

    found = partitions(store, experiment, "rollouts")
    if not found:
        raise ArtifactMissing(
            f"{experiment} has no rollouts in {store.url}: run `triplane iterate -e {experiment}` first"
        )
    return found[-1]


def _materialized(store: Store, experiment: str, iteration: str) -> Path | None:
    from resources.refs import read_artifact

    found = read_artifact(store, experiment, "report", iteration)
    return found.path("report.html") if found else None


def _drawn(store: Store, experiment: str, iteration: str) -> bytes:
    from ops.report.build import compose
    from ops.report.history import earlier_rows
    from ops.report.sources import find_sources
    from ops.report.timings import earlier_seconds, earlier_speeds

    place = (store, experiment, iteration)
    return compose(find_sources(*place), earlier_rows(*place), earlier_seconds(*place), earlier_speeds(*place)).page
