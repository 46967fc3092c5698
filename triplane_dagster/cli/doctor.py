"""`triplane doctor`: report what works on this machine, what is missing, and how to fix it."""

from __future__ import annotations

from typing import Annotated

import typer

from triplane_dagster.cli.options import AsJson
from triplane_dagster.cli.output import console, print_json


def doctor(
    as_json: AsJson = False,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Also import packages that take long to import, e.g. vLLM.")
    ] = False,
) -> None:
    """Test what Triplane requires or can use on this machine. Exits 1 if the default quickstart can't run here.

    Examples:

        triplane doctor

        TRIPLANE_STORE=s3://bucket/prefix triplane doctor --json
    """
    from triplane_dagster.doctor import accelerators, isolation, machine, services
    from triplane_dagster.doctor.findings import make

    checks = [*machine.checks(), *isolation.checks(), *accelerators.checks(thorough), *services.checks()]
    found = make(checks)
    wrong = [check.name for check, finding in found if check.required and finding.state != "ok"]
    if as_json:
        rows = [
            {"name": check.name, "needed_for": check.needed_for, "required": check.required, **vars(finding)}
            for check, finding in found
        ]
        print_json({"quickstart": not wrong, "checks": rows})
    else:
        _print([(check.name, check.needed_for, finding.state, finding.found, finding.fix) for check, finding in found])
        if wrong:
            console().print(f"The quickstart can't run here: repair {', '.join(wrong)}.")
        else:
            console().print("The quickstart can run here: `triplane demo`.")
    if wrong:
        raise typer.Exit(1)


def _print(rows: list[tuple[str, str, str, str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    from contracts.visible import visible

    styles = {"ok": "green", "missing": "yellow", "broken": "red"}
    table = Table(header_style="bold")
    for name in ("what", "state", "found", "needed for", "to do"):
        table.add_column(name, overflow="fold")
    for name, needed_for, state, found, fix in rows:
        table.add_row(name, Text(state, styles[state]), *(Text(visible(each)) for each in (found, needed_for, fix)))
    console().print(table)
