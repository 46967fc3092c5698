"""Results as tables, and as one JSON object for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.catalog import CATALOG
from benchmarks.goals import Goal, Verdict
from benchmarks.result import Options, Result
from triplane_dagster.cli.output import console


def as_json(
    name: str, options: Options, machine: Mapping[str, Any], result: Result, verdicts: Sequence[Verdict]
) -> dict[str, Any]:
    """Complete result of one run, JSON-like."""
    return {
        "benchmark": name,
        "options": options.model_dump(mode="json"),
        "machine": dict(machine),
        "metrics": dict(result.metrics),
        "rows": [dict(row) for row in result.rows],
        "notes": list(result.notes),
        "goals": [verdict.model_dump(mode="json") for verdict in verdicts],
        "passed": all(verdict.met for verdict in verdicts),
    }


def print_report(name: str, machine: Mapping[str, Any], result: Result, verdicts: Sequence[Verdict]) -> None:
    """Print the rows, the metrics and the goals."""
    out = console()
    out.print(f"{name} on {machine['cpu']}, {machine['cores']} cores, load {machine['load_average'][0]}")
    if result.rows:
        out.print(table_of(result.rows))
    out.print(table_of([{"metric": metric, "value": number(value)} for metric, value in result.metrics.items()]))
    out.print(table_of([_goal_row(verdict) for verdict in verdicts]))
    for note in result.notes:
        out.print(note)


def print_catalog(goals: Mapping[str, Sequence[Goal]], *, as_text: bool) -> None:
    """Print the benchmarks and their goals."""
    rows = [
        {"benchmark": name, "measures": text, "goals": _goals_text(goals.get(name, []))}
        for name, text in CATALOG.items()
    ]
    if not as_text:
        print(json.dumps(rows, indent=1))
        return
    out = console()
    out.print(table_of(rows))
    out.print("python -m benchmarks NAME --help shows the options of one.", highlight=False)


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Table of rows with equal keys."""
    table = Table(*rows[0].keys(), highlight=True) if rows else Table()
    for row in rows:
        table.add_row(*(number(value) if isinstance(value, float) else str(value) for value in row.values()))
    return table


def number(value: float) -> str:
    """Four significant digits, without an exponent if possible."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _goal_row(verdict: Verdict) -> dict[str, Any]:
    goal, measured = verdict.goal, verdict.measured
    return {
        "goal": goal.name,
        "wanted": f"{goal.comparison} {number(goal.value)} {goal.unit}",
        "measured": "not measured" if measured is None else number(measured),
        "": "met" if verdict.met else "MISSED",
    }


def _goals_text(goals: Sequence[Goal]) -> str:
    return "\n".join(f"{goal.metric} {goal.comparison} {number(goal.value)} {goal.unit}" for goal in goals)
