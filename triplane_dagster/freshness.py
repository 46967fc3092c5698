"""Freshness of a scheduled experiment: dataset and sampler are overdue if a night has brought none."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import chain, islice, pairwise, takewhile

import dagster as dg

from assets.naming import key_of
from resources.experiment import Experiment, ScheduleConfig
from triplane_dagster.private_dagster import schedule_execution_time_iterator

NIGHTLY = ("dataset", "sampler")
"""Assets that every night brings: what sampling ends with, and the decision."""
_FIRST, _LAST = (datetime(year, 1, 1, tzinfo=UTC).timestamp() for year in (2026, 2027))
"""Times between which the longest pause is looked for, in seconds since 1970: a year, since daylight saving time makes
one night of it an hour longer. Fixed, so that equal schedules have equal policies.
"""
_LEAST, _MOST = 10, 10_000
"""Fewest ticks, for schedules with few a year, and most: a year of hourly starts. A tick costs 50 us."""
_DURATION_H = 24.0
"""Time for the first iteration of a night, if the schedule has no limit of its own, in hours."""


def with_freshness(experiment: Experiment, asset: dg.AssetsDefinition) -> dg.AssetsDefinition:
    """The asset, with a freshness policy if a scheduled experiment brings one every night."""
    plan = experiment.schedule
    if plan is None or not asset.keys <= {key_of(experiment, name) for name in NIGHTLY}:
        return asset
    policy = dg.FreshnessPolicy.time_window(fail_window=allowed_pause(plan))
    return asset.map_asset_specs(lambda spec: dg.apply_freshness_policy(spec, policy))


def allowed_pause(plan: ScheduleConfig) -> timedelta:
    """Time after which an asset of NIGHTLY is overdue."""
    return longest_pause(plan) + timedelta(hours=plan.max_hours or _DURATION_H)


def longest_pause(plan: ScheduleConfig) -> timedelta:
    """Longest time between two nights."""
    # timestamps: the difference of two datetimes of one time zone ignores changes of its clocks
    times = (each.timestamp() for each in schedule_execution_time_iterator(_FIRST, plan.cron, plan.timezone))
    year = chain(islice(times, _LEAST), takewhile(lambda each: each <= _LAST, islice(times, _MOST)))
    return timedelta(seconds=max(later - earlier for earlier, later in pairwise(year)))
