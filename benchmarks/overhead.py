"""Overhead: the share of an iteration without sampling, tools, grading or optimizing.

Sampling, tools and grading count while at least one call to an engine or a sandbox is open; optimizing is the sum of
the trainer's seconds per step. Everything else is overhead: Dagster, starting processes, loading weights, Parquet,
digests, merging.
"""

from __future__ import annotations

import json
import time

import dagster as dg
from pydantic import Field

from benchmarks.measure import median
from benchmarks.result import Options, Result
from benchmarks.spans import MeasuredSampler, MeasuredSandboxes, Spans
from benchmarks.workbench import DEFAULT_FOLDER, Workbench
from contracts.artifacts import open_artifact
from contracts.store import Store
from resources.experiment import Experiment
from resources.progress import no_progress
from resources.refs import require_ref
from triplane_dagster.assembly import definitions_for
from triplane_dagster.cli.quiet import quiet_dagster
from triplane_dagster.cli.timings import experiment_seconds
from triplane_dagster.experiment_files import experiments_folder
from triplane_dagster.iterations import next_partition
from triplane_dagster.jobs import base_job_name, iteration_job_name
from triplane_dagster.run import open_instance

WORK = ("sampling", "tools", "grading")


class OverheadOptions(Options):
    """Options of the `overhead` benchmark."""

    iterations: int = Field(2, ge=1, le=100)
    """Measured iterations, after one warm-up; results are medians."""
    experiment: str = "quickstart"
    """The experiment to measure."""
    work: str = DEFAULT_FOLDER
    """Folder that keeps the base policy between runs."""
    set: str = ""
    """Overrides, separated by blanks, e.g. "prompts.groups=16"."""


OPTIONS = OverheadOptions


def run(options: OverheadOptions) -> Result:
    """Make the base policy if it is missing, warm up with one iteration, measure the next ones."""
    bench = Workbench.at(options.work)
    source = experiments_folder() / f"{options.experiment}.yaml"
    experiment = bench.add_experiment(source, "overhead", options.set.split())
    bench.enter(experiment.name)
    measured = _measure(bench.store, experiment, options.iterations)
    kinds = next(iter(measured.values())).keys()
    metrics = {f"{kind}_seconds": median([seconds[kind] for seconds in measured.values()]) for kind in kinds}
    metrics["overhead_percent"] = median([100 * seconds["overhead"] / seconds["wall"] for seconds in measured.values()])
    spent = experiment_seconds(experiment.name)
    names = [*kinds, *next(iter(spent[iteration] for iteration in measured))]
    steps = [
        {"seconds of": name, **{each: round((measured[each] | spent[each])[name], 2) for each in measured}}
        for name in names
    ]
    note = (
        "sampling, tools and grading overlap; busy is their union. The rows after overhead are Dagster's seconds an"
        " asset."
    )
    return Result(metrics, steps, [note])


def _measure(store: Store, experiment: Experiment, iterations: int) -> dict[str, dict[str, float]]:
    """Iteration -> seconds by kind of work."""
    sandboxes, sampler = MeasuredSandboxes(), MeasuredSampler()
    given = {
        "sandboxes": dg.ResourceDefinition.hardcoded_resource(sandboxes),
        "sampler": dg.ResourceDefinition.hardcoded_resource(sampler),
    }
    definitions = definitions_for([experiment], no_progress, given)
    job = definitions.resolve_job_def(iteration_job_name(experiment))
    try:
        with quiet_dagster(), open_instance() as instance:
            definitions.resolve_job_def(base_job_name(experiment)).execute_in_process(instance=instance)
            found: dict[str, dict[str, float]] = {}
            for _ in range(iterations + 1):
                partition = next_partition(store, experiment)
                spans = Spans()
                sandboxes.record_in(spans)
                sampler.record_in(spans)
                instance.add_dynamic_partitions(experiment.name, [partition])
                begin = time.perf_counter()
                job.execute_in_process(instance=instance, partition_key=partition)
                wall = time.perf_counter() - begin
                found[partition] = _seconds(spans, wall, optimizing_seconds(store, experiment, partition))
            return dict(list(found.items())[1:])
    finally:
        sampler.close()
        sandboxes.close()


def _seconds(spans: Spans, wall: float, optimizing: float) -> dict[str, float]:
    busy = spans.busy(*WORK)
    kinds = {kind: spans.busy(kind) for kind in WORK}
    return {"wall": wall, **kinds, "busy": busy, "optimizing": optimizing, "overhead": wall - busy - optimizing}


def optimizing_seconds(store: Store, experiment: Experiment, partition: str) -> float:
    """Seconds of the trainer's steps, from its metrics."""
    checkpoint = open_artifact(store, require_ref(store, experiment.name, "checkpoint", partition))
    lines = checkpoint.path("metrics.jsonl").read_text().splitlines()
    return float(sum(json.loads(line).get("seconds", 0.0) for line in lines))
