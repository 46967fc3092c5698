"""Limits of the shared parts of a cluster, and the size at which each is reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.cluster_costs import Costs
from benchmarks.cluster_model import Assumptions, Load, load_of, size_of

LARGEST = 1 << 22
"""GPUs up to which limits are searched."""
VOLUME, NIGHTS = 20 * 2**30, 90
"""Default size of the chart's volume of PostgreSQL, and how many nights it should last."""


@dataclass(frozen=True)
class Limit:
    """A limit of something shared."""

    name: str
    most: float
    used: Callable[[Load], float]
    unit: str
    source: str
    remedy: str
    breaks: bool = True
    """False: beyond it something waits, but nothing fails."""
    value: str = ""
    """Value of the chart that moves it."""


def limits_of(costs: Costs, given: Assumptions) -> list[Limit]:
    """All limits. Sources are published ones, or this machine's measurement."""
    return [*_postgres(costs, given), *_kubernetes(given), *_s3(), *_shards(), *_names()]


def _postgres(costs: Costs, given: Assumptions) -> list[Limit]:
    """Limits of Dagster's queue and records."""
    return [
        Limit(
            "runs at once",
            8,
            lambda load: load.size.experiments,
            "runs",
            "default of runs.maxConcurrent",
            "more runs wait in the queue: raise runs.maxConcurrent",
            breaks=False,
            value="runs.maxConcurrent",
        ),
        Limit(
            f"PostgreSQL volume, {NIGHTS} nights",
            VOLUME / 2**30,
            lambda load: NIGHTS * load.postgres_bytes_night / 2**30,
            "GiB",
            "default of postgres.storage.size; events are kept for good",
            "raise postgres.storage.size, or delete runs of old iterations",
            value="postgres.storage.size",
        ),
        Limit(
            "PostgreSQL sessions a second",
            costs.postgres.connects_s,
            lambda load: load.sessions_second,
            "1/s",
            "measured: one client that opens sessions one after the other; Dagster opens one for each query",
            "PgBouncer before PostgreSQL, or a server of more cores",
        ),
        Limit(
            "PostgreSQL sessions at once",
            97,
            lambda load: load.connections,
            "sessions",
            "max_connections 100, of which 3 are reserved",
            "raise max_connections, or PgBouncer; larger shards (rollouts.concurrency)",
        ),
        Limit(
            "events stored a second",
            costs.postgres.inserts_s,
            lambda load: load.rows_night / (given.night_hours * 3600),
            "1/s",
            "measured: four writers",
            "a server of more cores",
        ),
    ]


def _kubernetes(given: Assumptions) -> list[Limit]:
    """Limits of the API server, etcd and the cluster."""
    return [
        Limit(
            "Kubernetes API requests in flight",
            245,
            lambda load: 2 * load.size.experiments + 1,
            "requests",
            "priority level workload-low: 100 of 245 shares of 400 + 200; if all drivers ask at once, each one thing",
            "a FlowSchema and a PriorityLevelConfiguration for the account triplane-dagster",
        ),
        Limit(
            "etcd database",
            2.0,
            lambda load: (load.kept_objects * given.kept_bytes) / 1e9,
            "GB",
            "default of --quota-backend-bytes",
            "a shorter runs.ttlSeconds",
            value="runs.ttlSeconds",
        ),
        Limit(
            "pods, of which those of the last hour are kept",
            150_000,
            lambda load: load.kept_objects + load.size.experiments * load.size.shards,
            "pods",
            "kubernetes.io, considerations for large clusters",
            "a shorter runs.ttlSeconds",
            value="runs.ttlSeconds",
        ),
        Limit(
            "sandbox nodes",
            5_000,
            lambda load: load.size.nodes,
            "nodes",
            "kubernetes.io, considerations for large clusters",
            "a second cluster for sandboxes: TRIPLANE_ENVD takes several addresses",
        ),
    ]


def _s3() -> list[Limit]:
    """Limits of the store."""
    return [
        Limit(
            "S3 writes a second",
            3_500,
            lambda load: load.s3_writes_second,
            "1/s",
            "AWS, for each partitioned prefix",
            "AWS divides prefixes by itself, since keys are hashes; or a bucket for each team",
        ),
        Limit(
            "S3 reads a second",
            5_500,
            lambda load: load.s3_reads_second,
            "1/s",
            "AWS, for each partitioned prefix",
            "as for writes",
        ),
    ]


def _shards() -> list[Limit]:
    """Limits of the run pod, which launches and checks the shards of an iteration."""
    return [
        Limit(
            "one round of health checks",
            5.0,
            lambda load: load.check_seconds,
            "s",
            "CHECK_S of triplane_dagster.step_pods",
            "a lost step is noticed later: larger shards (rollouts.concurrency)",
            breaks=False,
        ),
        Limit(
            "launch of all shards of a run",
            60.0,
            lambda load: load.launch_seconds,
            "s",
            "ours: 7% of an iteration of 15 minutes; Dagster launches them one by one",
            "larger shards (rollouts.concurrency)",
            breaks=False,
        ),
        Limit(
            "shards of an experiment",
            1_024,
            lambda load: load.size.shards,
            "shards",
            "bound of prompts.workers",
            "larger shards (rollouts.concurrency)",
        ),
    ]


def _names() -> list[Limit]:
    """Limits of the name that stands for all sandbox servers."""
    return [
        Limit(
            "DNS reply by UDP",
            512,
            lambda load: load.dns_bytes,
            "bytes",
            "RFC 1035; resolvers then ask by TCP",
            "none is needed: resolvers of glibc ask again by TCP",
            breaks=False,
        ),
        Limit(
            "DNS reply by TCP",
            65_535,
            lambda load: load.dns_bytes,
            "bytes",
            "RFC 1035",
            "several Services, with commas in TRIPLANE_ENVD",
        ),
    ]


@dataclass(frozen=True)
class Reached:
    """Where a limit is reached."""

    limit: Limit
    gpus: int | None
    """Fewest GPUs at which it is exceeded; None: not up to LARGEST."""
    sandboxes: int | None


def reached(limit: Limit, costs: Costs, given: Assumptions, per_experiment: int) -> Reached:
    """Fewest GPUs at which a limit is exceeded, in steps of 8. per_experiment: GPUs of one experiment; 0: all."""

    def exceeded(eights: int) -> bool:
        size = size_of(8 * eights, per_experiment or 8 * eights)
        return limit.used(load_of(size, costs, given)) > limit.most

    low, high = 0, 1
    while not exceeded(high):
        low, high = high, 2 * high
        if 8 * high > LARGEST:
            return Reached(limit, None, None)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if exceeded(middle) else (middle, high)
    return Reached(limit, 8 * high, size_of(8 * high, per_experiment or 8 * high).sandboxes)


def first_broken(found: list[Reached]) -> Reached | None:
    """The limit that breaks something at the fewest GPUs."""
    real = [each for each in found if each.limit.breaks and each.gpus is not None]
    return min(real, key=lambda each: each.gpus or 0, default=None)
