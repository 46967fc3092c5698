"""Test that repeatedly killed iterations produce the same content as undisturbed ones and leave nothing behind.

    undisturbed:  iterate -n K                                                  -> iterate -n K -> ...
    disturbed:    iterate -n K, killed, again, killed, ... until it is through  -> the same, until all kills are dealt
                                                            compared here, and again after every further round

Half of the kills happen at named points (contracts.failpoints), half at random times to a random victim. --faults adds
faults of the store: S3 behind a proxy that fails, delays, truncates and loses replies, or a local disk that refuses
writes. The seed determines the sequence of kills.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from benchmarks.chaos_kills import kill_all
from benchmarks.chaos_lab import Lab
from benchmarks.chaos_round import Disturbed, Twin
from benchmarks.faulty_s3 import Weather, faulty_s3
from benchmarks.result import Options, Result
from benchmarks.s3server import s3_server
from benchmarks.surroundings import surroundings
from envd.sandbox.linux import adopt_orphans
from envd.sandbox.proctree import descendants
from resources.progress import Progress
from triplane_dagster.cli.bars import Bars

BUCKET = "chaos"
MULTIPART_MB = "0.25"
"""Small enough that trainer states are uploaded in parts, so that kills can interrupt an upload."""
FAULT_RATE = 0.03
"""Share of the S3 requests that fail with --faults."""


class ChaosOptions(Options):
    """Options of the `chaos` benchmark."""

    kills: int = Field(100, ge=1, le=10_000)
    """Number of kills per store."""
    store: Literal["local", "s3", "both"] = "both"
    """Store: a directory, a local S3 server, or both in turn."""
    faults: bool = False
    """Whether the store also fails at random."""
    seed: int = 0
    """Seed of the kills and faults."""
    iterations: int = Field(3, ge=1, le=100)
    """Iterations per round."""
    round_kills: int = Field(20, ge=1, le=1000)
    """Maximum kills per round; then the round is finished and compared, and the next begins."""
    keep: str = ""
    """Folder that keeps stores and logs; empty: a temporary folder that is removed."""


OPTIONS = ChaosOptions


def run(options: ChaosOptions) -> Result:
    """Disturb each store until all of its kills are done."""
    stores = ("local", "s3") if options.store == "both" else (options.store,)
    began = time.monotonic()
    with ExitStack() as stack:
        folder = Path(options.keep) if options.keep else Path(stack.enter_context(_folder()))
        adopt_orphans()
        stack.callback(_end_all, frozenset(descendants(os.getpid())))
        bars = stack.enter_context(Bars())
        twin = Twin(Lab(folder / "twin"), options.iterations)
        found: dict[str, Disturbed] = {}
        for store in stores:
            with _place(store, folder / store, options) as (lab, weather):
                disturbed = found[store] = Disturbed(lab, twin, options.seed, faults=options.faults)
                disturbed.run(options.kills, options.round_kills, _shown(bars, store, options.kills))
                disturbed.store_faults.update(weather.counts if weather else {})
        return _result(found, options.kills, time.monotonic() - began)


def _shown(bars: Bars, store: str, kills: int) -> Callable[[int], None]:
    return lambda dealt: bars(Progress(f"chaos {store}", None, "kills", dealt, kills))


def _end_all(spared: Set[int]) -> None:
    """End all processes that were started here, also after Ctrl-C or an error."""
    kill_all([pid for pid in descendants(os.getpid()) if pid not in spared])


@contextmanager
def _folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        yield folder


@contextmanager
def _place(store: str, folder: Path, options: ChaosOptions) -> Iterator[tuple[Lab, Weather | None]]:
    """Lab with this kind of store, and the random faults of its requests."""
    folder.mkdir(parents=True)
    if store == "local":
        yield Lab(folder), None
        return
    import boto3

    with s3_server(folder) as server, ExitStack() as stack:
        here = {**server.environment, "TRIPLANE_CACHE": str(folder / "look")}
        stack.enter_context(surroundings(here))
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        runs, weather = {**server.environment, "TRIPLANE_S3_MULTIPART_MB": MULTIPART_MB}, None
        if options.faults:
            weather = Weather(FAULT_RATE, options.seed)
            proxy = stack.enter_context(faulty_s3(server.endpoint.removeprefix("http://")))
            proxy.weather = weather
            runs["AWS_ENDPOINT_URL"] = proxy.endpoint
        yield Lab(folder, f"s3://{BUCKET}/x", runs), weather


def _result(found: dict[str, Disturbed], kills: int, seconds: float) -> Result:
    totals: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    notes = []
    for store, disturbed in found.items():
        metrics = disturbed.metrics(kills)
        totals = {name: totals.get(name, 0.0) + value for name, value in metrics.items()}
        rows.append({"store": store, **disturbed.row()})
        notes += [f"{store}: {line}" for line in disturbed.notes()]
    return Result({**totals, "minutes": seconds / 60}, rows, notes)
