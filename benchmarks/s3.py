"""The same experiment in a directory and on a local S3 server: equal content, and the cost of S3 per iteration.

    local: base assets -> 0000 ------> 0001 ------> ...
    s3:       base assets -> 0000 ------> 0001 ---> ...      turn about, in one process, so that a change of load meets
              both

Both start empty, in a temporary folder that is removed at the end, also after Ctrl-C.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import dagster as dg
import yaml
from pydantic import Field

from benchmarks.measure import median
from benchmarks.result import Options, Result
from benchmarks.s3requests import Traffic, traffic_of
from benchmarks.s3server import S3Server, s3_server
from contracts.artifacts import list_artifacts
from contracts.store import Store, open_store
from ops.iteration_keys import iteration_key
from resources.experiment import Experiment, load_experiment, read_values
from resources.overrides import apply_overrides
from resources.progress import Progress, ProgressSink
from triplane_dagster.cli.bars import Bars
from triplane_dagster.cli.quiet import quiet_dagster
from triplane_dagster.experiment_files import experiments_folder
from triplane_dagster.run import Runner, open_runner

BUCKET = "triplane"
SHOWN = 24
"""Maximum listed kinds of requests."""


class S3Options(Options):
    """Options of the `s3` benchmark."""

    iterations: int = Field(0, ge=0, le=1000)
    """Iterations in each store; 0: the experiment's number."""
    experiment: str = "quickstart"
    """Name of an experiment, or the path of a YAML file."""
    set: str = ""
    """Overrides, separated by blanks, e.g. "prompts.groups=16"."""


OPTIONS = S3Options


@dataclass
class Place:
    """One of the two stores, with separate Dagster records."""

    name: str
    url: str
    runner: Runner
    seconds: list[float] = field(default_factory=list)
    """Seconds of each iteration."""

    @property
    def store(self) -> Store:
        """Store with the artifacts."""
        return open_store(self.url)

    def run(self, partition: str | None) -> None:
        """Run the base assets (None) or an iteration in this store."""
        os.environ["TRIPLANE_STORE"] = self.url
        begin = time.perf_counter()
        try:
            if partition is None:
                self.runner.base()
                return
            self.runner.iteration(partition)
        except dg.DagsterExecutionInterruptedError:  # Dagster's error for Ctrl-C
            raise KeyboardInterrupt from None
        self.seconds.append(time.perf_counter() - begin)


def run(options: S3Options) -> Result:
    """Run the experiment in both places, and compare their artifacts."""
    with tempfile.TemporaryDirectory(prefix="bench-s3-") as scratch, Bars() as bars, quiet_dagster():
        folder = Path(scratch)
        experiment = _experiment(options, folder)
        with s3_server(folder) as server, _environment(server, folder), ExitStack() as open_places:
            urls = {"local": str(folder / "store"), "s3": f"s3://{BUCKET}/{experiment.name}"}
            local, remote = (
                open_places.enter_context(_place(name, url, experiment, folder, bars)) for name, url in urls.items()
            )
            traffic = _run_turn_about(local, remote, options.iterations or experiment.iterations, server)
            return _result(local, remote, traffic)


def _run_turn_about(local: Place, remote: Place, iterations: int, server: S3Server) -> list[Traffic]:
    """Run iterations alternately in both places. Returns the traffic of each iteration on S3."""
    traffic = []
    for partition in (None, *map(iteration_key, range(iterations))):
        local.run(partition)
        server.taken()
        remote.run(partition)
        if partition is not None:
            traffic.append(traffic_of(server.taken()))
    return traffic


def _result(local: Place, remote: Place, traffic: Sequence[Traffic]) -> Result:
    ours, theirs = _digests(local.store), _digests(remote.store)
    rows = [
        {
            "kind": kind,
            "artifacts": len(ours.get(kind, ())),
            "on S3": len(theirs.get(kind, ())),
            "digests": "equal" if ours.get(kind) == theirs.get(kind) else "DIFFERENT",
        }
        for kind in sorted(ours.keys() | theirs.keys())
    ]
    last = traffic[-1]
    metrics = {
        "digests_equal": float(ours == theirs),
        "iteration_seconds_local": median(local.seconds),
        "iteration_seconds_s3": median(remote.seconds),
        "iteration_ratio": median([there / here for here, there in zip(local.seconds, remote.seconds, strict=True)]),
        "requests_per_iteration": median([each.requests for each in traffic]),
        "megabytes_up_per_iteration": median([each.received / 1e6 for each in traffic]),
        "megabytes_down_per_iteration": median([each.sent / 1e6 for each in traffic]),
    }
    notes = [
        "requests of the last iteration: " + ", ".join(f"{verb} {count}" for verb, count in last.verbs.items()),
        *(f"  {count:6d}  {name}" for name, count in list(last.subjects.items())[:SHOWN]),
        "seconds of each iteration, local and on S3: "
        + ", ".join(f"{here:.1f} {there:.1f}" for here, there in zip(local.seconds, remote.seconds, strict=True)),
    ]
    return Result(metrics, rows, notes)


def _digests(store: Store) -> Mapping[str, list[str]]:
    """Content digests of every artifact by kind, sorted."""
    found: dict[str, list[str]] = {}
    for artifact in list_artifacts(store):
        found.setdefault(artifact.ref.kind, []).append(artifact.ref.digest)
    return {kind: sorted(digests) for kind, digests in found.items()}


def _experiment(options: S3Options, folder: Path) -> Experiment:
    named = Path(options.experiment)
    source = named if named.suffix == ".yaml" else experiments_folder() / f"{options.experiment}.yaml"
    values: dict[str, Any] = apply_overrides(read_values(source), options.set.split(), Experiment)
    path = folder / source.name
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return load_experiment(path)


@contextmanager
def _environment(server: S3Server, folder: Path) -> Iterator[None]:
    """Set the environment variables of both places, and restore them at the end. Creates the bucket."""
    before = dict(os.environ)
    os.environ.update({**server.environment, "TRIPLANE_CACHE": str(folder / "cache")})
    try:
        import boto3

        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _place(name: str, url: str, experiment: Experiment, folder: Path, bars: ProgressSink) -> Iterator[Place]:
    records = folder / f"dagster-{name}"
    records.mkdir()

    def show(update: Progress) -> None:
        bars(replace(update, partition=" ".join(filter(None, (name, update.partition)))))

    os.environ["TRIPLANE_STORE"] = url
    with dg.DagsterInstance.local_temp(str(records)) as instance, open_runner(experiment, instance, show) as runner:
        yield Place(name, url, runner)
