"""`triplane doctor`: report what works on this machine, what is missing, and how to fix it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from triplane_dagster.cli.options import AsJson
from triplane_dagster.cli.output import console, print_json

if TYPE_CHECKING:
    from triplane_dagster.doctor.findings import Check


def doctor(
    as_json: AsJson = False,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Also import packages that take long to import, e.g. vLLM.")
    ] = False,
    kubernetes: Annotated[
        bool, typer.Option("--kubernetes", help="Test a cluster instead: $KUBECONFIG's, or the one around this pod.")
    ] = False,
) -> None:
    """Test what Triplane requires or can use on this machine. Exits 1 if the default quickstart can't run here, or with
    --kubernetes if runs can't run on the cluster.

    Examples:

        triplane doctor

        TRIPLANE_STORE=s3://bucket/prefix triplane doctor --json

        triplane doctor --kubernetes
    """
    from triplane_dagster.doctor.findings import make

    found = make(_cluster_checks() if kubernetes else _machine_checks(thorough))
    wrong = [check.name for check, finding in found if check.required and finding.state != "ok"]
    if as_json:
        rows = [
            {"name": check.name, "needed_for": check.needed_for, "required": check.required, **vars(finding)}
            for check, finding in found
        ]
        print_json({"kubernetes" if kubernetes else "quickstart": not wrong, "checks": rows})
    else:
        _print([(check.name, check.needed_for, finding.state, finding.found, finding.fix) for check, finding in found])
        what, where = ("Runs", "on this cluster") if kubernetes else ("The quickstart", "here")
        if wrong:
            console().print(f"{what} can't run {where}: repair {', '.join(wrong)}.")
        else:
            console().print(
                f"{what} can run {where}: `triplane {'iterate --on kubernetes' if kubernetes else 'demo'}`."
            )
    if wrong:
        raise typer.Exit(1)


def _machine_checks(thorough: bool) -> list[Check]:
    from triplane_dagster.doctor import accelerators, isolation, machine, services

    return [*machine.checks(), *isolation.checks(), *accelerators.checks(thorough), *services.checks()]


def _cluster_checks() -> list[Check]:
    from triplane_dagster.doctor import cluster
    from triplane_dagster.experiment_files import experiments_folder, load_folder

    return cluster.checks(load_folder(experiments_folder()).experiments)


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
