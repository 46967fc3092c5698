"""Seconds of each asset of an iteration on the cluster, beside those of a local run. It prints a table for
docs/kubernetes.md and judges no time: machines differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from ops.graph import PER_ITERATION
from tests.acceptance.laboratory import Laboratory
from tests.kubernetes.cluster.conftest import TINY
from tests.kubernetes.cluster.world import World

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(3600)]
ITERATIONS = 4
"""The first one of each place is left out: it starts what the others find running."""
_STEPS = """
query ($run: ID!) {
  runOrError(runId: $run) {
    ... on Run { creationTime startTime endTime stepStats { stepKey startTime endTime } }
  }
}"""


def test_the_seconds_of_each_asset_are_told_beside_a_local_run(world: World, tmp_path: Path) -> None:
    world.iterate("tiny", ITERATIONS)
    runs = [run for run in world.runs("tiny_iteration") if run["status"] == "SUCCESS"][: ITERATIONS - 1]
    remote = [_seconds(world.ask(_STEPS, run=run["runId"])["runOrError"]) for run in runs]
    rows = Laboratory(tmp_path / "local", TINY).iterate(ITERATIONS)["iterations"]
    local = [{**row["seconds"], "whole run": sum(row["seconds"].values())} for row in rows[1:]]
    assert len(remote) == len(local) == ITERATIONS - 1
    assert all(seconds["checkpoint"] > 0 for seconds in (*remote, *local))
    print(f"steps are pods: {world.steps_are_pods}; medians of {len(remote)} iterations, in seconds")
    for name in (*PER_ITERATION, "before the run", "between steps", "whole run"):
        values = (median(each.get(name, 0.0) for each in place) for place in (local, remote))
        print(f"| {name} | " + " | ".join(f"{value:.1f}" for value in values) + " |")


def _seconds(run: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of each asset's steps in a run (of mapped ones from the first's start to the last's end), from the
    request of the run to its start, and in which no step ran.
    """
    spans: dict[str, list[tuple[float, float]]] = {}
    for step in run["stepStats"]:
        asset = step["stepKey"].partition(".")[0].removeprefix("tiny__")
        spans.setdefault(asset, []).append((step["startTime"], step["endTime"]))
    found = {name: max(end for _, end in each) - min(start for start, _ in each) for name, each in spans.items()}
    covered, reached = 0.0, 0.0
    for start, end in sorted(span for each in spans.values() for span in each):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    whole = run["endTime"] - run["startTime"]
    found |= {"before the run": run["startTime"] - run["creationTime"], "whole run": whole}
    return {**found, "between steps": whole - covered}
