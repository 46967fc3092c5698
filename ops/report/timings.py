"""Durations of assets from Dagster's records; outside every digest."""

from __future__ import annotations

import dagster as dg

from contracts.artifacts import Artifact
from contracts.store import Store
from ops.costs import Costs
from resources.refs import partitions, read_artifact

Seconds = dict[str, dict[str, float]]
"""Iteration -> asset -> seconds."""
RUNS = 20
"""Number of runs of one iteration to read: the latest."""


def iteration_seconds(instance: dg.DagsterInstance, experiment: str, iteration: str) -> dict[str, float]:
    """Seconds of each finished step of one iteration by asset, over all its runs."""
    found: dict[str, float] = {}
    for run in instance.get_runs(dg.RunsFilter(tags={"dagster/partition": iteration}), limit=RUNS):
        for step in instance.get_run_step_stats(run.run_id):
            owner, name = f"{experiment}__", step.step_key.partition(".")[0]
            if name.startswith(owner) and step.start_time and step.end_time:
                asset = name.removeprefix(owner)
                found[asset] = found.get(asset, 0.0) + step.end_time - step.start_time
    return found


def earlier_costs(store: Store, experiment: str, iteration: str) -> dict[str, Costs]:
    """Costs of the iterations before this one, from their latest report."""
    report = _earlier_report(store, experiment, iteration)
    found: dict[str, Costs] = report.json("costs.json") if report and "costs.json" in report.names() else {}
    return found


def earlier_seconds(store: Store, experiment: str, iteration: str) -> Seconds:
    """Seconds of the iterations before this one, from their latest report."""
    report = _earlier_report(store, experiment, iteration)
    found: Seconds = report.json("timings.json") if report else {}
    return found


def _earlier_report(store: Store, experiment: str, iteration: str) -> Artifact | None:
    reports = [each for each in partitions(store, experiment, "report") if each < iteration]
    return read_artifact(store, experiment, "report", reports[-1]) if reports else None
