"""Iterations under random faults of the cluster end right, make what an undisturbed laptop makes, and leave nothing.

TRIPLANE_TEST_FAULTS=20     number of faults, one in each iteration
TRIPLANE_TEST_SEED=0        which ones
TRIPLANE_TEST_LOCAL=FOLDER  keeps the local run, for more faults in a namespace that is kept, too
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

import pytest

from contracts.artifacts import list_artifacts
from contracts.store import open_store
from tests.acceptance.laboratory import Laboratory
from tests.acceptance.test_iterations_are_exact import KINDS
from tests.kubernetes.cluster.conftest import TINY
from tests.kubernetes.cluster.faults import FAULTS
from tests.kubernetes.cluster.world import World

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(6 * 3600)]
COUNT = int(os.environ.get("TRIPLANE_TEST_FAULTS", "10"))
SEED = int(os.environ.get("TRIPLANE_TEST_SEED", "0"))
PORTION = 10
"""Faults between two undisturbed iterations."""


def test_random_faults_lose_seconds_and_nothing_else(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dice = random.Random(SEED)
    possible = sorted(kind for kind in FAULTS if world.steps_are_pods or not kind.endswith(" step"))
    kinds = [kind for _ in range(COUNT // len(possible) + 1) for kind in dice.sample(possible, len(possible))][:COUNT]
    world.wait("the web server answers", lambda: world.runs() is not None)
    before = world.made("tiny")
    # a fault that comes too late in one iteration for a trainer or a step hits it in the next
    asked = 2 + len(kinds) + (len(kinds) - 1) // PORTION + sum("trainer" in kind or "step" in kind for kind in kinds)
    world.train("tiny", asked)
    world.finish("tiny", before + 1)
    undisturbed = _seconds(world, lambda: None)
    table: list[tuple[str, str, float]] = []
    for number, kind in enumerate(kinds):
        if number and number % PORTION == 0:  # the machine may be shared, and the history grows
            undisturbed = _seconds(world, lambda: None)
            print(f"undisturbed {undisturbed:.0f} s", flush=True)
        hit: list[str] = []

        def strike(kind: str = kind, hit: list[str] = hit, span: float = 0.8 * undisturbed) -> None:
            time.sleep(dice.uniform(0, span))
            found = world.wait(kind, lambda: FAULTS[kind](world, dice), 120)
            hit.append(found)

        seconds = _seconds(world, strike)
        table.append((kind, hit[0], seconds - undisturbed))
        print(f"{kind}: {hit[0]}; {seconds - undisturbed:+.0f} s", flush=True)
    world.finish("tiny", before + asked)
    for variable, value in world.store.items():
        monkeypatch.setenv(variable, value)
    local = Laboratory(Path(os.environ.get("TRIPLANE_TEST_LOCAL") or tmp_path / "local"), TINY)
    if missing := world.made("tiny") - len(local.digests("dataset")["dataset"]):
        local.iterate(missing)
    remote = Laboratory(tmp_path / "remote", TINY, environment=world.store)
    assert remote.digests(*KINDS) == local.digests(*KINDS)
    _require_nothing_left(world)
    lost = [seconds for _, _, seconds in table]
    print(f"{COUNT} faults; seconds lost: median {median(lost):.0f}, mean {mean(lost):.0f}, most {max(lost):.0f}")


def _seconds(world: World, strike: Callable[[], None]) -> float:
    """Seconds from one decision to the next, with a fault."""
    before, begun = world.wait("the web server answers", lambda: world.made("tiny")), time.monotonic()
    strike()
    world.finish("tiny", before + 1)
    return time.monotonic() - begun


def _require_nothing_left(world: World) -> None:
    """No trainer at work, and no checkpoint that was trained twice. Ended trainers of killed runs go by their TTL."""

    def working() -> bool:
        return any(job["status"].get("active") for job in world.get("jobs", "app.kubernetes.io/component=trainer"))

    world.wait("no trainer is at work", lambda: not working(), 120)
    store = open_store(world.store["TRIPLANE_STORE"])
    keys = Counter(artifact.ref.key for artifact in list_artifacts(store, "checkpoint"))
    assert max(keys.values()) == 1
