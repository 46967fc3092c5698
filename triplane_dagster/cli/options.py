"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
ExperimentName = Annotated[
    str,
    typer.Option("--experiment", "-e", help="Name of an experiment in experiments/, or the path of a YAML file."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B=C",
        help="Override a value of the experiment, e.g. --set rollouts.group_size=4. Repeatable.",
    ),
]
Limit = Annotated[int, typer.Option("--limit", "-n", min=1, help="At most this many rows.")]
Shares = Annotated[
    list[str] | None,
    typer.Option(
        "--split", metavar="NAME=SHARE", help="Share of train, gate or held_out. Repeatable; default .6, .2, .2."
    ),
]
SandboxesOf = Annotated[
    str, typer.Option("--experiment", "-e", help="Experiment (name or YAML file) whose sandbox settings are used.")
]
