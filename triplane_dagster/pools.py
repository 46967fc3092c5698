"""Limit each experiment to one run at a time, in the queue of the daemon.

Every asset of an experiment is in a pool named after it, so that runs of single assets and backfills count, too, which
have no tags of ours. `dagster.yaml` gives unknown pools the limit 1, but only after the daemon has first seen a run of
theirs: two runs that are queued together would start together.
"""

from __future__ import annotations

from collections.abc import Iterable

import dagster as dg


def limit_pools(instance: dg.DagsterInstance, experiments: Iterable[str]) -> None:
    """Set the limit of these experiments' pools to 1 unless somebody has set one in the UI.

    Does nothing in an instance whose pools limit steps, not runs: there, a limit would make the shards of an iteration
    follow one another, and a killed process would keep its slots.
    """
    storage = instance.event_log_storage
    granularity = storage.get_pool_config().pool_granularity
    if granularity is None or granularity.value != "run":
        return
    known = {pool.name for pool in storage.get_pool_limits() if not pool.from_default}
    for name in experiments:
        if name not in known:
            storage.set_concurrency_slots(name, 1)
