"""`triplane store`: check that every artifact is complete, remove files that are not needed, build the ledger anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from contracts.errors import ArtifactCorrupt
from contracts.store import open_store
from contracts.upkeep import Garbage, check_store, find_garbage, remove_garbage
from triplane_dagster.cli.options import AsJson
from triplane_dagster.cli.output import print_json, print_rows

app = typer.Typer(no_args_is_help=True, help="Check the artifact store, remove files that are not needed, or index it.")

_WHY = {
    "attempt": "no manifest names it",
    "upload": "its upload never ended",
    "staging": "its process has ended",
}


@app.command()
def check(as_json: AsJson = False) -> None:
    """Read every artifact from the store and compare it with its manifest. Exits 1 if anything is missing or changed.

    Examples:

        triplane store check

        triplane --store s3://bucket/prefix store check --json
    """
    store = open_store()
    with _bytes_bar("checking") as progress:
        checked = check_store(store, progress)
    rows = [{"place": each.place, "fault": each.fault} for each in checked.faults]
    if as_json:
        print_json({"store": store.url, **vars(checked), "faults": rows})
    else:
        print_rows(rows, as_json=False, empty=f"{checked.artifacts} artifacts, {checked.files} files: all as committed")
    if rows:
        raise ArtifactCorrupt(
            f"{len(rows)} damaged or missing files in {store.url}: delete the folders artifacts/<kind>/<key> named"
            " above and run their steps again, or copy them from a backup"
        )


@app.command()
def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be removed.")] = False,
    older_than: Annotated[
        float, typer.Option("--older-than", metavar="HOURS", min=1, help="Keep files changed within this many hours.")
    ] = 24.0,
    as_json: AsJson = False,
) -> None:
    """Remove leftovers of killed writers: files that no manifest names, and incomplete uploads.

    Artifacts are never touched.

    Leftovers of this machine's processes are removed at once; others only when they are old, since their writer may be
    running elsewhere.

    Examples:

        triplane store gc --dry-run

        triplane store gc --older-than 6
    """
    store = open_store()
    found = find_garbage(store, older_than * 3600)
    gone = found if dry_run else [each for each in found if remove_garbage(store, each)]
    if as_json:
        print_json([_row(each) for each in gone])
        return
    print_rows([_row(each) for each in gone], as_json=False, empty=f"nothing to remove in {store.url}")
    if gone:
        size = sum(each.size or 0 for each in gone)
        typer.echo(f"{size / 1e6:.1f} MB {'would be ' if dry_run else ''}removed")


@app.command()
def reindex(as_json: AsJson = False) -> None:
    """Build the ledger, the index that `triplane recall` reads, from the manifests.

    Runs and questions keep it current. This is for a store whose files were restored or removed by hand.

    Example:

        triplane store reindex
    """
    from ops.ledger.index import rebuild

    store, console = open_store(), Console(stderr=True)
    columns = (TextColumn("indexing"), TextColumn("{task.completed} artifacts"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("indexing", total=None)
        done = rebuild(store, lambda count: progress.update(task, completed=count))
    if as_json:
        print_json({"store": store.url, "artifacts": done})
    else:
        typer.echo(f"{done} artifacts indexed")


def _row(garbage: Garbage) -> dict[str, str | int | float | None]:
    return {
        "what": garbage.what,
        "place": garbage.place,
        "bytes": garbage.size,
        "age in hours": round(garbage.age_s / 3600, 1),
        "why": _WHY[garbage.what],
    }


@contextmanager
def _bytes_bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """Progress bar on stderr; none if stderr is not a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
