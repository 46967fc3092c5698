"""Seconds that assets took, from Dagster's own records of the runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dagster import DagsterInstance


def asset_seconds(
    instance: DagsterInstance, experiment: str, assets: Iterable[str], partition: str | None
) -> dict[str, float]:
    """Seconds of each asset's steps in every run that worked on this partition, interrupted ones included."""
    from dagster import RunsFilter

    from triplane_dagster.jobs import EXPERIMENT_TAG

    tags = {EXPERIMENT_TAG: experiment} | ({"dagster/partition": partition} if partition else {})
    found = dict.fromkeys(assets, 0.0)
    for run in instance.get_runs(RunsFilter(tags=tags)):
        if partition is None and run.tags.get("dagster/partition"):
            continue
        for step in instance.get_run_step_stats(run.run_id):
            asset = step.step_key.partition(".")[0].removeprefix(f"{experiment}__")
            if asset in found and step.start_time and step.end_time:
                found[asset] += step.end_time - step.start_time
    return found
