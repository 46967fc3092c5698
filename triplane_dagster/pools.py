"""Limit each experiment to one run at a time, in the queue of the daemon; with overlap, one that samples and one that
learns.

Every asset is in a pool of its experiment (`ops.graph.pool_of`), so that runs of single assets and backfills count,
too, which have no tags of ours. `dagster.yaml` gives unknown pools the limit 1, but only after the daemon has first
seen a run of theirs: two runs that are queued together would start together.
"""

from __future__ import annotations

from collections.abc import Iterable

import dagster as dg

from ops.graph import PER_ITERATION, pool_of
from resources.experiment import Experiment


def limit_pools(instance: dg.DagsterInstance, experiments: Iterable[Experiment]) -> None:
    """Set the limit of these experiments' pools to 1 unless somebody has set one in the UI.

    Does nothing in an instance whose pools limit steps, not runs: there, a limit would make the shards of an iteration
    follow one another, and a killed process would keep its slots.
    """
    storage = instance.event_log_storage
    granularity = storage.get_pool_config().pool_granularity
    if granularity is None or granularity.value != "run":
        return
    known = {pool.name for pool in storage.get_pool_limits() if not pool.from_default}
    for name in {pool_of(each, asset) for each in experiments for asset in PER_ITERATION} - known:
        storage.set_concurrency_slots(name, 1)
