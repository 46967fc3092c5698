"""Load of the shared parts of a cluster at a few sizes, and which limit is reached first.

unit costs: measured here (`cluster_measure`) or recorded  -> model (`cluster_model`, `cluster_limits`)
sandboxes over servers: simulated with the real client     -> `cluster_fleet`
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from benchmarks.cluster_costs import RECORDED, Costs, read_costs
from benchmarks.cluster_fleet import simulate
from benchmarks.cluster_limits import Reached, first_broken, limits_of, reached
from benchmarks.cluster_model import Assumptions, Load, Size, load_of, size_of
from benchmarks.result import NotHereError, Options, Result

SIZES = (8, 64, 512)
SANDBOXES = ((100, 1, 2), (1_000, 4, 3), (10_000, 40, 19))
"""Sandboxes, step pods that use them, and servers, of which one is lost."""
WEIGHTS_GB, GPUS_OF_REPLICA = 31, 8
"""Of the FP8 checkpoint of Qwen3-30B-A3B, which each engine reads."""


class ClusterOptions(Options):
    """Options of the `cluster` benchmark."""

    measure: bool = True
    """Measure unit costs (5 to 15 minutes); false: take those of benchmarks/cluster_costs.json."""
    record: bool = False
    """Write measured costs to that file."""
    iteration_minutes: float = Field(15, gt=0, le=10_000)
    """Length of an iteration."""
    night_hours: float = Field(10, gt=0, le=24)
    """Length of a night."""
    per_experiment: int = Field(64, ge=1, le=100_000)
    """GPUs of one experiment; a larger cluster runs several of them."""


OPTIONS = ClusterOptions


def run(options: ClusterOptions) -> Result:
    """Measure or read unit costs, and compute."""
    costs = _measured(options) if options.measure else read_costs()
    given = replace(Assumptions(), iteration_minutes=options.iteration_minutes, night_hours=options.night_hours)
    loads = [load_of(size_of(gpus, options.per_experiment), costs, given) for gpus in SIZES]
    several, single = (
        [reached(limit, costs, given, each) for limit in limits_of(costs, given)]
        for each in (options.per_experiment, 0)
    )
    largest = load_of(Size(SIZES[-1], SIZES[-1] // options.per_experiment, 10_000), costs, given)
    first = first_broken(several)
    metrics = {
        "hard_at_largest": float(sum(_breaks(each, SIZES[-1]) for each in (*several, *single))),
        "first_breaks_at_gpus": float(first.gpus if first and first.gpus else 0),
        "api_calls_minute": largest.api_minute,
        "rows_night": largest.rows_night,
        "s3_requests_second": largest.s3_reads_second + largest.s3_writes_second,
    }
    spreads = [(each, simulate(*each)) for each in SANDBOXES]
    metrics["fullest_server_ratio"] = max(spread.most / spread.mean for _, spread in spreads)
    notes = [
        *(_of_limit(each, other, loads[-1]) for each, other in zip(several, single, strict=True)),
        *(
            f"{count:,} sandboxes of {clients} step pods on {servers} servers: fullest {spread.most} (mean"
            f" {spread.mean:.0f}), {spread.lost} play again when it is lost, then fullest {spread.most_after}"
            for (count, clients, servers), spread in spreads
        ),
        "measured: " + ", ".join(f"{name} {value:.4g}" for name, value in _shown(costs).items()),
        f"costs: {costs.note}",
        f"assumed: {given}",
        _first(first),
    ]
    return Result(metrics, _table(loads), notes)


def _measured(options: ClusterOptions) -> Costs:
    if shutil.which("initdb") is None and not any(map(shutil.which, ("pg_ctl", "postgres"))):
        raise NotHereError("PostgreSQL is not installed: use --measure false")
    from benchmarks.cluster_measure import measure

    found = measure()
    if options.record:
        found.write(RECORDED)
    return found


def _breaks(found: Reached, gpus: int) -> bool:
    """Whether a limit is exceeded that no value of the chart moves."""
    return found.limit.breaks and not found.limit.value and found.gpus is not None and found.gpus <= gpus


def _table(loads: Sequence[Load]) -> list[Mapping[str, Any]]:
    """One row for each quantity, one column for each size."""
    columns = {f"{load.size.gpus} GPUs": _quantities(load) for load in loads}
    names = next(iter(columns.values()))
    return [{"quantity": name, **{size: each[name] for size, each in columns.items()}} for name in names]


def _quantities(load: Load) -> Mapping[str, float]:
    size = load.size
    return {
        "experiments side by side": size.experiments,
        "sandboxes": size.sandboxes,
        "step pods that play episodes": size.experiments * size.shards,
        "sandbox nodes": size.nodes,
        "weights to download for each policy, GB": WEIGHTS_GB * max(1, size.gpus // GPUS_OF_REPLICA),
        "Kubernetes API calls a minute": load.api_minute,
        **{f"  {source}": calls for source, calls in load.api.items()},
        "Kubernetes events an hour": load.events_hour,
        "S3 reads a second": load.s3_reads_second,
        "S3 writes a second": load.s3_writes_second,
        "event rows of Dagster a night": round(load.rows_night),
        "PostgreSQL MB a night": load.postgres_bytes_night / 1e6,
        "PostgreSQL sessions opened a second": load.sessions_second,
        "PostgreSQL sessions at once": load.connections,
        "connections of each envd server": load.envd_connections,
    }


def _of_limit(several: Reached, single: Reached, load: Load) -> str:
    limit = several.limit
    share = limit.used(load) / limit.most
    at = [f"{each.gpus:,} GPUs" if each.gpus else "no size" for each in (several, single)]
    kind = "" if limit.breaks else " (only waits)"
    kind += f" (value {limit.value})" if limit.value else ""
    return (
        f"{limit.name}: {share:.1%} of {limit.most:,.4g} {limit.unit} at {load.size.gpus} GPUs; exceeded at {at[0]}, as"
        f" one experiment at {at[1]}{kind}; {limit.source}; then: {limit.remedy}"
    )


def _first(first: Reached | None) -> str:
    if first is None:
        return "nothing breaks"
    return f"first: {first.limit.name}, at {first.gpus:,} GPUs with {first.sandboxes:,} sandboxes: {first.limit.remedy}"


def _shown(costs: Costs) -> Mapping[str, float]:
    api, records, s3 = costs.api, costs.postgres, costs.s3
    return {
        "API calls a minute of a step": api.polls_step,
        "of a run": api.polls_run,
        "of a young training": api.trainer_minute[0],
        "of a training": api.trainer_minute[1],
        "rows of a run": records.rows_run,
        "of a step ": records.rows_step,
        "bytes of a row": records.bytes_row,
        "sessions of a step": records.sessions_step,
        "idle sessions a minute": records.idle_sessions_minute,
        "sessions of a look": records.poll_sessions,
        "S3 requests of an iteration": sum(s3.iteration.values()),
        "of a group": sum(s3.group.values()),
        "of an episode": sum(s3.episode.values()),
        "a minute of a training": s3.trainer_minute,
        "sessions opened a second": records.connects_s,
        "events stored a second": records.inserts_s,
    }
