"""Overlap: how much less wall clock an iteration takes when the next one is sampled while it trains.

Sampling and training are simulated: each waits so long, as for GPUs elsewhere. All else is real: the tiny experiment of
the tests through `triplane iterate`, with its processes, Dagster and store. Both ways run one after the other.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

from pydantic import Field

from benchmarks.measure import median
from benchmarks.result import Options, Result
from benchmarks.workbench import Workbench
from contracts.errors import TriplaneError
from contracts.store import Store
from resources.refs import partitions, read_artifact

ROOT = Path(__file__).parents[1]
WAYS = {"one_after_another": "false", "overlap": "true"}


class OverlapOptions(Options):
    """Options of the `overlap` benchmark."""

    iterations: int = Field(5, ge=3, le=100)
    """Iterations of each way; the time between two decisions is measured."""
    sampling: float = Field(20.0, ge=0)
    """Simulated seconds of sampling."""
    training: float = Field(20.0, ge=0)
    """Simulated seconds of training. The closer to those of sampling, the more overlap can save."""


OPTIONS = OverlapOptions


def run(options: OverlapOptions) -> Result:
    """Run both ways. Raises TriplaneError for a command that fails."""
    rows: list[dict[str, str | float]] = []
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="bench-overlap-") as scratch:
        bench = Workbench.at(scratch)
        for name, overlap in WAYS.items():
            bench.add_experiment(ROOT / "tests/dagster/tiny.yaml", name, [f"off_policy.overlap={overlap}"])
            seconds = _seconds_between(bench, name, options)
            found[name] = median(seconds)
            rows.append(
                {
                    "way": name,
                    "seconds": round(found[name], 1),
                    "from": round(min(seconds), 1),
                    "to": round(max(seconds), 1),
                }
            )
    before, after = (found[way] for way in WAYS)
    metrics = {"saved_percent": 100 * (1 - after / before), "seconds": after, "seconds_one_after_another": before}
    note = f"simulated: sampling {options.sampling:g} s, training {options.training:g} s; the rest is real work"
    return Result(metrics, rows, [note])


def _seconds_between(bench: Workbench, name: str, options: OverlapOptions) -> list[float]:
    """Seconds between the decisions of consecutive iterations, without the first."""
    delays = {"SAMPLING_SECONDS": str(options.sampling), "TRAINING_SECONDS": str(options.training)}
    path = f"{ROOT / 'benchmarks/delays'}:{ROOT}:{ROOT / 'kernels'}"
    command = [str(Path(sys.executable).with_name("triplane")), "iterate", "-e", name, "-n", str(options.iterations)]
    done = subprocess.run(
        command, env={**bench.environment(name), **delays, "PYTHONPATH": path}, capture_output=True, text=True
    )
    if done.returncode:
        raise TriplaneError(f"`{' '.join(command)}` failed: {done.stderr[-2000:]}")
    decided = _decisions(bench.store, name)
    return [later - earlier for earlier, later in itertools.pairwise(decided)][1:]


def _decisions(store: Store, experiment: str) -> list[float]:
    found = (read_artifact(store, experiment, "sampler", each) for each in partitions(store, experiment, "sampler"))
    return [artifact.manifest.created_unix for artifact in found if artifact]
