"""Milliseconds of one tick of the sensor `NAME_sequence` after many iterations, on a local store and on S3.

    store with N decided iterations, Dagster instance with N runs that have ended -> sensor evaluated, again and again

Each tick asks for the same next iteration, since no run of it is launched. The first tick of a process lists all
iterations; it is shown, but not judged.
"""

from __future__ import annotations

import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import boto3
import dagster as dg
from dagster import DagsterRun, DagsterRunStatus
from pydantic import Field

from benchmarks.measure import median
from benchmarks.result import Options, Result
from benchmarks.s3server import s3_server
from contracts.artifacts import ArtifactRef, ArtifactWriter
from contracts.digests import canonical_json, digest_of
from contracts.errors import TriplaneError
from contracts.store import Store, open_store
from ops.deploy_decision import Decision
from ops.iteration_keys import iteration_key
from resources.experiment import Experiment, load_experiment
from resources.refs import write_ref
from triplane_dagster.assembly import definitions_for
from triplane_dagster.experiment_files import experiments_folder
from triplane_dagster.jobs import EXPERIMENT_TAG, TARGET_TAG, iteration_job_name
from triplane_dagster.targets import request_target

BUCKET = "bench"
WRITERS = 4


class TickOptions(Options):
    """Options of the `tick` benchmark."""

    iterations: int = Field(10_000, ge=1, le=100_000)
    """Decided iterations, and runs of the Dagster instance."""
    ticks: int = Field(15, ge=1, le=1000)
    """Ticks on each store, after the first one; results are medians."""
    experiment: str = "quickstart"
    """The experiment whose sensor is evaluated."""


OPTIONS = TickOptions


def run(options: TickOptions) -> Result:
    """Fill an instance and two stores, and time the sensor on both."""
    experiment = load_experiment(experiments_folder() / f"{options.experiment}.yaml")
    with tempfile.TemporaryDirectory(prefix="bench-tick-") as scratch, _instance(Path(scratch)) as instance:
        folder = Path(scratch)
        _add_runs(instance, experiment, options.iterations)
        local = _measure(instance, experiment, str(folder / "store"), options)
        with s3_server(folder) as server, _environment({**server.environment, "TRIPLANE_CACHE": str(folder / "cache")}):
            boto3.client("s3").create_bucket(Bucket=BUCKET)
            server.taken()
            remote = _measure(instance, experiment, f"s3://{BUCKET}/store", options)
            requests = len(server.taken())
    ticks = {"local": local, "s3": remote}
    rows = [
        {"store": name, "first ms": each[0], "median ms": median(each[1:]), "slowest ms": max(each[1:])}
        for name, each in ticks.items()
    ]
    metrics = {f"{name}_ms": median(each[1:]) for name, each in ticks.items()}
    note = f"{options.iterations:,} iterations and runs; {requests:,} requests to the S3 server, filling it included"
    return Result(metrics, rows, [note])


def _measure(instance: dg.DagsterInstance, experiment: Experiment, url: str, options: TickOptions) -> list[float]:
    """Milliseconds of each tick. Raises TriplaneError if a tick does not request the next iteration."""
    with _environment({"TRIPLANE_STORE": url}):
        store = open_store()
        _fill(store, experiment, options.iterations)
        request_target(store, experiment, 1, request="bench")
        definitions = definitions_for([experiment])
        sensor = definitions.resolve_sensor_def(f"{experiment.name}_sequence")
        found = []
        for _ in range(options.ticks + 1):
            context = dg.build_sensor_context(instance=instance, definitions=definitions)
            begin = time.perf_counter()
            answer = sensor(context)
            found.append(1000 * (time.perf_counter() - begin))
            asked = [each.partition_key for each in getattr(answer, "run_requests", None) or ()]
            if asked != [iteration_key(options.iterations)]:
                raise TriplaneError(f"a tick asked for {asked}: {answer}")
    return found


def _fill(store: Store, experiment: Experiment, iterations: int) -> None:
    """Base assets, and decided iterations; only the last one has artifacts."""
    for asset, kind in (("task_suite", "task_suite"), ("base_policy", "checkpoint")):
        write_ref(store, experiment.name, asset, None, ArtifactRef(kind=kind, key="0" * 64, digest="0" * 64))
    body = canonical_json(ArtifactRef(kind="sampler", key="0" * 64, digest="0" * 64).model_dump(mode="json"))
    names = [
        f"pointers/assets/{experiment.name}/{asset}/{iteration_key(number)}/00000001.json"
        for asset in ("sampler", "report")
        for number in range(iterations - 1)
    ]
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda name: store.create(name, body), names))
    last, policy = iteration_key(iterations - 1), ArtifactRef(kind="checkpoint", key="0" * 64, digest="0" * 64)
    decision = Decision(decision="live", reasons=[], candidate=policy, parent=policy, pointer_number=None)
    for asset in ("sampler", "report"):
        with ArtifactWriter(store, asset, digest_of([asset, last]), parents={}, config={}, code_version="1") as out:
            out.add_json("decision.json", decision.model_dump(mode="json"))
            write_ref(store, experiment.name, asset, last, out.commit().ref)


@contextmanager
def _instance(folder: Path) -> Iterator[dg.DagsterInstance]:
    """A Dagster instance with the storage of this project's `dagster.yaml`: SQLite files."""
    home = folder / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    with dg.DagsterInstance.from_config(str(home)) as instance:
        yield instance


def _add_runs(instance: dg.DagsterInstance, experiment: Experiment, count: int) -> None:
    """Runs of earlier iterations that succeeded, one an iteration."""
    for number in range(count):
        tags = {
            "dagster/partition": iteration_key(number),
            EXPERIMENT_TAG: experiment.name,
            TARGET_TAG: f"earlier-{number // 100}",
        }
        instance.add_run(
            DagsterRun(
                job_name=iteration_job_name(experiment),
                run_id=str(uuid.uuid4()),
                status=DagsterRunStatus.SUCCESS,
                tags=tags,
            )
        )


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name)
            else:
                os.environ[name] = value
