"""Load of the shared parts of a cluster at a size, from measured costs: pure functions.

Size, Costs, Assumptions -> load_of -> Load -> cluster_limits: share of each limit, and the size at which it breaks
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.cluster_costs import Costs

EPISODES_PER_GPU = 169 / 8
"""Contexts of 16,384 tokens that 8 GPUs of 80 GB hold at 90% (`triplane plan -e qwen3-30b-a3b`)."""
EPISODES_PER_SHARD = 256
"""`rollouts.concurrency` of that experiment: what one step pod plays at once."""
SANDBOXES_PER_NODE = 640
"""Of 64 cores, when 10% of an episode's time is tools."""
SPARE = 0.15
"""Share of nodes that are spare."""
CALLS_OF_LAUNCH = 2
"""In a cluster, a run's pod reads its own uid before it creates the Job of a step."""
EVENTS_OF_POD = 7
"""Scheduled, Pulling, Pulled, Created, Started of a pod; SuccessfulCreate and Completed of its Job."""


@dataclass(frozen=True)
class Assumptions:
    """What is neither measured nor decided by us."""

    iteration_minutes: float = 15
    night_hours: float = 10
    episode_minutes: float = 3
    group_size: int = 18
    """Episodes of a group, those that are oversampled included."""
    training_share: float = 0.4
    """Share of an iteration in which a training is under way."""
    api_seconds: float = 0.02
    """Seconds in which the API server answers a health check."""
    start_seconds: float = 5
    """Seconds within which pods start that were created together."""
    kept_bytes: float = 30_000
    """Bytes in etcd of a finished Job, its pod and its events."""

    @property
    def iterations(self) -> float:
        """Iterations of one experiment a night."""
        return self.night_hours * 60 / self.iteration_minutes


@dataclass(frozen=True)
class Size:
    """Size of a deployment."""

    gpus: int
    experiments: int
    """That run side by side, with equal parts of the GPUs."""
    sandboxes: int
    """At once, one for each episode."""

    @property
    def shards(self) -> int:
        """Step pods in which one experiment plays its episodes."""
        return max(1, math.ceil(self.sandboxes / self.experiments / EPISODES_PER_SHARD))

    @property
    def nodes(self) -> int:
        """Nodes of the sandbox pool, with spare ones."""
        needed = math.ceil(self.sandboxes / SANDBOXES_PER_NODE)
        return needed + max(1, round(SPARE * needed))


def size_of(gpus: int, per_experiment: int) -> Size:
    """Size with as many sandboxes as the engines hold contexts. per_experiment: GPUs of one experiment."""
    return Size(gpus, max(1, gpus // per_experiment), max(1, int(gpus * EPISODES_PER_GPU)))


@dataclass(frozen=True)
class Load:
    """Load of the shared parts."""

    size: Size
    steps: float
    """Steps of an iteration of one experiment."""
    api: dict[str, float]
    """Source -> calls of the Kubernetes API a minute."""
    rows_night: float
    """Rows of Dagster's event log."""
    postgres_bytes_night: float
    sessions_second: float
    """Sessions of PostgreSQL that are opened."""
    connections: float
    """Sessions of PostgreSQL at once, when all shards start together."""
    s3_reads_second: float
    s3_writes_second: float
    kept_objects: float
    """Jobs of the last hour, each with its pod."""
    events_hour: float
    """Kubernetes events, which are kept for an hour."""
    launch_seconds: float
    """Seconds in which a run launches its shards, one after the other."""
    check_seconds: float
    """Seconds of one round of health checks of a run's steps."""
    dns_bytes: float
    """Size of the answer with all addresses of envd."""
    envd_connections: int
    """Connections of each envd server."""

    @property
    def api_minute(self) -> float:
        """Calls of the Kubernetes API a minute."""
        return sum(self.api.values())


def load_of(size: Size, costs: Costs, given: Assumptions) -> Load:
    """Load at a size. All shards are taken to run for the whole iteration, which is an upper bound."""
    api, records = costs.api, costs.postgres
    runs, minutes = size.experiments, given.iteration_minutes
    steps = records.steps + records.steps_shard * (size.shards - 2)
    rows = given.iterations * runs * (records.rows_run + steps * records.rows_step)
    of_steps = runs * steps * records.sessions_step / minutes / 60
    idle = (records.idle_sessions_minute + runs * records.experiment_sessions_minute) / 60
    sessions = idle + runs * records.poll_sessions + of_steps
    hourly = runs * (steps + 2) * 60 / minutes
    session_s = 1 / records.connects_s
    return Load(
        size,
        steps,
        {
            "runs: launch and watch": runs * (1 / minutes + api.polls_run),
            "steps: launch": runs * steps * CALLS_OF_LAUNCH / minutes,
            "steps: health checks": runs * size.shards * api.polls_step,
            "trainings: watch": runs * (given.training_share * api.trainer_minute[1] + api.trainer_minute[0] / minutes),
            "sensor of orphans": api.orphans,
        },
        rows,
        rows * records.bytes_row,
        sessions,
        sessions * session_s + _at_once(size, records.sessions_step, session_s, given),
        *_s3(size, costs, given),
        hourly,
        hourly * EVENTS_OF_POD,
        size.shards * api.launch_seconds,
        size.shards * given.api_seconds,
        dns_bytes(size.nodes),
        size.shards * runs,
    )


def _at_once(size: Size, sessions: float, session_s: float, given: Assumptions) -> float:
    """Sessions at once while the shards of one experiment start: each opens one after the other."""
    return min(size.shards, size.shards * sessions * session_s / given.start_seconds)


def _s3(size: Size, costs: Costs, given: Assumptions) -> tuple[float, float]:
    """Reads and writes a second."""
    episodes = size.sandboxes / (given.episode_minutes * 60)
    groups, iterations = episodes / given.group_size, size.experiments / (given.iteration_minutes * 60)
    found = {"reads": size.experiments * given.training_share * costs.s3.trainer_minute / 60, "writes": 0.0}
    for verb in costs.s3.iteration:
        a_second = (
            iterations * costs.s3.iteration[verb] + groups * costs.s3.group[verb] + episodes * costs.s3.episode[verb]
        )
        found["reads" if verb in ("GET", "HEAD") else "writes"] += a_second  # LIST counts with the slower ones
    return found["reads"], found["writes"]


def dns_bytes(servers: int, name: str = "triplane-envd.triplane.svc.cluster.local") -> int:
    """Size of a DNS reply with one A record for each server: RFC 1035, names compressed to two bytes."""
    return 12 + len(name) + 2 + 4 + 16 * servers
