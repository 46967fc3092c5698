"""Durations of assets from Dagster's records; outside every digest."""

from __future__ import annotations

from typing import Any

import dagster as dg

from contracts.store import Store
from ops.costs import Costs
from ops.pod_tags import EXPERIMENT_LABEL
from resources.refs import partitions, read_artifact

Seconds = dict[str, dict[str, float]]
"""Iteration -> asset -> seconds."""
Speeds = dict[str, float]
"""Iteration -> tokens that its rollouts sampled a second."""
RUNS = 20
"""Number of runs of one iteration to read: the latest."""
LISTED_RUNS = 500
"""Number of runs of that key to look through, those of other experiments included."""


def iteration_seconds(instance: dg.DagsterInstance, experiment: str, iteration: str) -> dict[str, float]:
    """Seconds of each finished step of one iteration by asset, over all its runs."""
    found: dict[str, float] = {}
    listed = instance.get_runs(dg.RunsFilter(tags={"dagster/partition": iteration}), limit=LISTED_RUNS)
    # runs from an asset's page have no tag, and may be those of any experiment
    for run in [each for each in listed if each.tags.get(EXPERIMENT_LABEL, experiment) == experiment][:RUNS]:
        for step in instance.get_run_step_stats(run.run_id):
            owner, name = f"{experiment}__", step.step_key.partition(".")[0]
            if name.startswith(owner) and step.start_time and step.end_time:
                asset = name.removeprefix(owner)
                found[asset] = found.get(asset, 0.0) + step.end_time - step.start_time
    return found


def earlier_costs(store: Store, experiment: str, iteration: str) -> dict[str, Costs]:
    """Costs of the iterations before this one, from their latest report."""
    return _earlier(store, experiment, iteration, "costs.json")


def earlier_seconds(store: Store, experiment: str, iteration: str) -> Seconds:
    """Seconds of the iterations before this one, from their latest report."""
    return _earlier(store, experiment, iteration, "timings.json")


def earlier_speeds(store: Store, experiment: str, iteration: str) -> Speeds:
    """Sampling speeds of the iterations before this one, from their latest report."""
    return _earlier(store, experiment, iteration, "speeds.json")


def _earlier(store: Store, experiment: str, iteration: str, name: str) -> dict[str, Any]:
    """A file of the latest report before an iteration; empty if there is none."""
    reports = [each for each in partitions(store, experiment, "report") if each < iteration]
    report = read_artifact(store, experiment, "report", reports[-1]) if reports else None
    found: dict[str, Any] = report.json(name) if report and name in report.names() else {}
    return found
