"""`triplane fork`: begin an experiment that trains on the episodes of another one's iteration."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from contracts.errors import ConfigError
from contracts.store import open_store
from triplane_dagster.cli.experiments import file_in_store
from triplane_dagster.cli.options import AsJson, Overrides
from triplane_dagster.cli.output import print_json, print_rows


def fork(
    source: Annotated[
        str, typer.Argument(metavar="NAME/0003", help="Experiment and iteration whose episodes are trained on again.")
    ],
    name: Annotated[str, typer.Option("--as", help="Name of the new experiment.")],
    overrides: Overrides = None,
    replay: Annotated[
        int, typer.Option("--replay", min=1, max=9999, help="Iterations of the source to repeat, from that one on.")
    ] = 1,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what the first iteration shares and makes; write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write an experiment file whose first iteration repeats one of another experiment with other settings.

    It trains on the same episodes, by reference: nothing is sampled. Loss, filter, reward and evaluation may differ;
    settings of what was sampled may not. Later iterations sample by themselves.

    Examples:

        triplane fork quickstart/0001 --as exp2 --set trainer.algorithm.kind=dapo

        triplane fork quickstart/0000 --as exp3 --set rewards.valid=0 --dry-run

        triplane fork quickstart/0000 --as exp4 --replay 2 --set off_policy.max_staleness=2
    """
    experiment, _, key = source.rpartition("/")
    from ops.iteration_keys import iteration_number
    from triplane_dagster.dry_run import plan_of
    from triplane_dagster.fork import plan_fork

    if not experiment or iteration_number(key) is None:
        raise ConfigError(f"{source!r} names no iteration: write EXPERIMENT/KEY, such as quickstart/0003")
    store = open_store()
    planned = plan_fork(store, file_in_store(store, experiment), key, name, overrides or [], replay)
    steps = [dataclasses.asdict(step) for step in plan_of(planned.experiment, store)]
    if not dry_run:
        planned.write()
    if as_json:
        print_json({"file": str(planned.path), "written": not dry_run, "steps": steps})
        return
    rows = [{each: step[each] for each in ("step", "partition", "state", "where")} for step in steps]
    print_rows(rows, as_json=False, title=f"{name}: the first iteration of the fork (found: shared with {source})")
    if planned.shared:
        typer.echo(
            f"its engines and those of its source share {', '.join(planned.shared)}, where one policy is served at a"
            " time: do not run both at once, or set other ones in engine and evaluation.engine"
        )
    typer.echo(
        f"{planned.path} {'would be written' if dry_run else 'is written'}; then: triplane iterate -e {name} -n 1"
    )
