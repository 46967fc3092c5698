"""`triplane metrics`: read dumps of Prometheus metrics."""

from __future__ import annotations

import fnmatch
import time
from typing import Annotated

import typer

from triplane_dagster.cli.options import AsJson
from triplane_dagster.cli.output import print_rows


def metrics(
    dump: Annotated[str, typer.Argument(metavar="DUMP", help="File with the text of /metrics, or its http address.")],
    later: Annotated[str | None, typer.Argument(metavar="LATER", help="A later dump of the same program.")] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            min=0.1,
            max=86_400,
            metavar="S",
            help="Seconds between the dumps, for rates. Without LATER: read DUMP again after so long.",
        ),
    ] = None,
    match: Annotated[
        str, typer.Option("--match", "-m", metavar="GLOB", help="Only metrics whose name matches, as 'bridge_*'.")
    ] = "*",
    as_json: AsJson = False,
) -> None:
    """Show what a dump of Prometheus metrics says: counters, gauges, and the mean and quantiles of histograms. Of two
    dumps: what happened between them.

    Quantiles are linear within a histogram's bucket, as PromQL's. A counter that is lower in the later dump has begun
    anew with its program: all of it counts.

    Examples:

        triplane metrics http://127.0.0.1:9465/metrics --seconds 10

        curl -s http://127.0.0.1:8080/metrics > before.txt

        triplane metrics before.txt after.txt --match 'route_*' --seconds 300
    """
    from triplane_dagster.metric_dumps import columns, read_dump, summarize

    first = read_dump(dump)
    if later is None and seconds is not None:
        time.sleep(seconds)
        later = dump
    rows = summarize(first) if later is None else summarize(read_dump(later), first, seconds)
    shown = columns(row for row in rows if fnmatch.fnmatchcase(row["metric"], match))
    print_rows(shown, as_json=as_json, empty=f"no metric matches {match!r}")
