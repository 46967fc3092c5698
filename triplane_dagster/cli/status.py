"""`triplane status`: show the live policy and the results of each iteration."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from contracts.store import Store, open_store
from contracts.tasks import Split
from triplane_dagster.cli.experiments import name_in_store
from triplane_dagster.cli.options import AsJson
from triplane_dagster.cli.output import console, print_json, print_rows
from triplane_dagster.cli.stale import print_stale

FEW = 10
"""Iterations that fit on the disk, below which `status` warns."""


def status(
    experiment: Annotated[
        str, typer.Option("--experiment", "-e", help="Only this experiment (name or file); default: all in the store.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show the live policy of each experiment and the results of each iteration.

    Examples:

        triplane status

        triplane status -e quickstart --json
    """
    from resources.refs import experiments_in

    store = open_store()
    names = [name_in_store(store, experiment)] if experiment else experiments_in(store)
    found = [_status(store, name) for name in names]
    if as_json:
        print_json(found)
        return
    if not found:
        console().print(f"nothing in {store.url} yet: begin with `triplane demo`")
    for each in found:
        _print(store, each)


def _status(store: Store, experiment: str) -> dict[str, Any]:
    from resources.refs import read_ref
    from resources.registry import Registry
    from triplane_dagster.cli.history import REPORTED, base_measures, base_rate, json_of, rate_json, summaries
    from triplane_dagster.staleness import stale_steps

    live, history = Registry(store, experiment).live(), summaries(store, experiment)
    base = read_ref(store, experiment, "base_policy")
    return {
        "experiment": experiment,
        "disk": _disk(store, experiment),
        "live": live.model_dump(mode="json") if live else None,
        "live_because": f"{live.made_by} ({live.came_by})" if live else "nothing was promoted yet",
        "base_policy": base.digest if base else None,
        "base_pass_rates": {
            split.value: rate_json(base_rate(history, split)) for split in Split if split is not Split.TRAIN
        },
        "base_measures": {split.value: base_measures(history, split) for split in REPORTED},
        "iterations": [json_of(each) for each in history],
        "stale": [{**vars(each), "iterations": list(each.iterations)} for each in stale_steps(store, experiment)],
    }


def _disk(store: Store, experiment: str) -> dict[str, float] | None:
    """Bytes that an iteration adds, free bytes, and iterations that fit; None if the store is remote or has none."""
    from ops.retention import iteration_bytes

    size = iteration_bytes(store, experiment) if Path(store.url).is_dir() else None
    if not size:
        return None
    free = shutil.disk_usage(store.url).free
    return {"bytes_per_iteration": size, "free_bytes": free, "iterations_left": int(free // size)}


def _print(store: Store, found: dict[str, Any]) -> None:
    from triplane_dagster.cli.history import base_row, row_of, summaries

    out, live, name = console(), found["live"], found["experiment"]
    out.print(Text(name, "bold"))
    if live:
        out.print(Text(f"live: {live['policy']['digest'][:12]}, {found['live_because']}"))
    elif found["base_policy"]:
        out.print(f"live: the base policy {found['base_policy'][:12]}; nothing was promoted yet")
    else:
        out.print(f"no policy yet: run `triplane iterate -e {name}`")
    history = summaries(store, name)
    rows = [base_row(history), *map(row_of, history)] if history else []
    print_rows(rows, as_json=False, empty="no iteration yet")
    print_stale(store, name)
    disk = found["disk"]
    if disk and disk["iterations_left"] < FEW:
        typer.echo(
            f"warning: the disk of {store.url} has room for {disk['iterations_left']} more iterations of {name}"
            f" ({disk['bytes_per_iteration'] / 1e6:.0f} MB each): `triplane gc --keep-last 3` shows what may go",
            err=True,
        )
