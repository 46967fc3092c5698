"""The command tree."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from triplane_dagster.cli import (
    bridge,
    compare,
    data,
    doctor,
    episodes,
    evaluate,
    evaluations,
    experiments,
    fleet,
    fork,
    gc,
    iterate,
    lineage,
    metrics,
    place,
    plan,
    quarantine,
    recall,
    report,
    rollback,
    serve,
    status,
    store,
    tasks,
    train,
    ui,
    unpin,
)
from triplane_dagster.cli.guard import GuardedGroup

app = typer.Typer(
    cls=GuardedGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Train coding agents by reinforcement learning; each iteration is an asset graph of traceable artifacts.

    Start here:

        triplane demo                      # a small model learns to fix code on this CPU, in minutes

        triplane plan                      # memory of the experiment, by kind and moment

        triplane ui                        # the same graph in the Dagster UI

        triplane status                    # the live policy, and the results of each iteration

        triplane report --open             # an iteration as one page: curves, and every episode to read

        triplane fork NAME/0003 --as exp2  # the same episodes with another loss, filter or reward

        triplane compare NAME exp2         # both experiments, paired by task

        triplane episodes list             # what the policy did

        triplane evaluate NAME/0003        # pass rate of any policy on any suite

        triplane lineage <digest>          # what made it, what was made from it

        triplane recall --task <id>        # which policies were trained on it, and whether one is live

        triplane quarantine --task <id>    # keep it out of training, and retrain

    Digests and ids may be shortened to any unambiguous beginning.
    """,
)


@app.callback()
def _everywhere(
    store: Annotated[
        str | None,
        typer.Option(
            envvar="TRIPLANE_STORE",
            help="Location of the artifacts: a directory or s3://bucket/prefix.",
            show_default=".triplane/store",
        ),
    ] = None,
) -> None:
    if store:
        os.environ["TRIPLANE_STORE"] = store


app.command()(iterate.demo)
app.command()(iterate.iterate)
app.command()(plan.plan)
app.command()(place.place)
app.command()(status.status)
app.add_typer(episodes.app, name="episodes")
app.command()(evaluate.evaluate)
app.add_typer(evaluations.app, name="evaluations")
app.command()(lineage.lineage)
app.command()(recall.recall)
app.command()(quarantine.quarantine)
app.command()(report.report)
app.command()(compare.compare)
app.command()(ui.ui)
app.command()(doctor.doctor)
app.command()(serve.serve)
app.command()(bridge.bridge)
app.command()(rollback.rollback)
app.command()(unpin.unpin)
app.add_typer(fleet.app, name="fleet")
app.command()(fork.fork)
app.command()(train.train)
app.add_typer(tasks.app, name="tasks")
app.add_typer(data.app, name="data")
app.command()(gc.gc)
app.command()(metrics.metrics)
app.add_typer(store.app, name="store")
app.add_typer(experiments.app, name="experiments")
