"""Read the duration of each asset from Dagster's run records."""

from __future__ import annotations

Seconds = dict[str | None, dict[str, float]]
"""Partition (None: the unpartitioned assets) -> asset -> seconds, assets in graph order."""


def experiment_seconds(experiment: str) -> Seconds:
    """Seconds of each asset's steps in all runs of an experiment, including interrupted and repeated ones."""
    from dagster import RunsFilter

    from ops.graph import ONCE, PER_ITERATION
    from triplane_dagster.jobs import EXPERIMENT_TAG
    from triplane_dagster.run import open_instance

    found: Seconds = {}
    with open_instance() as instance:
        for run in instance.get_runs(RunsFilter(tags={EXPERIMENT_TAG: experiment})):
            partition = run.tags.get("dagster/partition")
            assets = found.setdefault(partition, dict.fromkeys(PER_ITERATION if partition else ONCE, 0.0))
            for step in instance.get_run_step_stats(run.run_id):
                asset = step.step_key.partition(".")[0].removeprefix(f"{experiment}__")
                if asset in assets and step.start_time and step.end_time:
                    assets[asset] += step.end_time - step.start_time
    return found
