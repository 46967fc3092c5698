"""`triplane gc`: remove what no policy, no iteration and no question needs any more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from contracts.store import open_store
from contracts.upkeep import find_garbage, remove_garbage
from triplane_dagster.cli.options import AsJson
from triplane_dagster.cli.output import print_json, print_rows

if TYPE_CHECKING:
    from ops.retention import Removable


def gc(
    keep_last: Annotated[
        int,
        typer.Option(
            "--keep-last",
            min=1,
            help="Iterations and promotions below the live policy that keep their trainer state.",
        ),
    ],
    older_than: Annotated[
        float, typer.Option("--older-than", metavar="HOURS", min=1, help="Keep what was made within this many hours.")
    ] = 24.0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove; without it nothing is changed.")] = False,
    as_json: AsJson = False,
) -> None:
    """List, and with --yes remove, trainer states that nothing starts from, groups that were merged into their
    rollouts, snapshots that are older than a week and that no iteration continues from, and leftovers of killed writers
    (as `triplane store gc` does).

    Kept: every checkpoint, dataset, episode, evaluation and report, so that lineage and recall answer as before; the
    trainer states of base policies, of live policies and the last promotions below them, of the last iterations, and of
    what these start from.

    A policy without its trainer state can be evaluated and served, but not rolled back to, and its iteration can't be
    trained again.

    Examples:

        triplane gc --keep-last 5

        triplane gc --keep-last 5 --yes
    """
    from ops.retention import removable, remove

    store, age_s = open_store(), older_than * 3600
    found, leftovers = removable(store, keep_last, age_s), find_garbage(store, age_s)
    if yes:
        for each in found:
            remove(store, each)
        leftovers = [each for each in leftovers if remove_garbage(store, each)]
    rows = [
        _row(kind, [each for each in found if each.ref.kind == kind]) for kind in sorted({e.ref.kind for e in found})
    ]
    if leftovers:
        sizes = [each.size or 0 for each in leftovers]
        rows.append({"kind": "leftovers", "count": len(sizes), "bytes": sum(sizes), "why": "no manifest names them"})
    if as_json:
        print_json({"store": store.url, "removed": yes, "kinds": rows})
        return
    print_rows(
        rows,
        as_json=False,
        empty=f"nothing to remove in {store.url}; what was made within {older_than:g} hours (--older-than) was kept",
    )
    if rows:
        size = (sum(each.size for each in found) + sum(each.size or 0 for each in leftovers)) / 1e6
        typer.echo(f"{size:.1f} MB removed" if yes else f"{size:.1f} MB would be removed: add --yes")


def _row(kind: str, found: Sequence[Removable]) -> dict[str, Any]:
    return {"kind": kind, "count": len(found), "bytes": sum(each.size for each in found), "why": found[0].why}
