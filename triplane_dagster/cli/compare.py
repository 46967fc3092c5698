"""`triplane compare`: experiments side by side, paired by task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from contracts.errors import ConfigError
from contracts.store import open_store
from triplane_dagster.cli.options import AsJson
from triplane_dagster.cli.output import print_json, print_rows, write_page


def compare(
    experiments: Annotated[list[str], typer.Argument(help="Names of two or more experiments in the store.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write an HTML page to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the candidates of experiments on held-out and unseen tasks, greedy and sampled, iteration by iteration.

    Differences are paired by task and taken from the first experiment; intervals are 95% intervals. A fork's iterations
    stand beside those whose episodes they repeat.

    Examples:

        triplane compare quickstart exp2

        triplane compare quickstart exp2 --output compared.html
    """
    from ops.report.comparison import cells, page
    from ops.report.comparison import compare as compared

    if len(set(experiments)) != len(experiments) or len(experiments) < 2:
        raise ConfigError(f"{' '.join(experiments)}: give two or more different experiments")
    rows = compared(open_store(), experiments)
    if output is not None:
        write_page(output, page(experiments, rows))
    if as_json:
        print_json(rows)
    else:
        print_rows([cells(row) for row in rows], as_json=False, title=f"{', '.join(experiments)}: candidates")
