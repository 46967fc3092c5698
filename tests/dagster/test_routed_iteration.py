"""An iteration whose rollouts are spread over several engines makes what one engine makes."""

from __future__ import annotations

from pathlib import Path

import pytest
from dagster_world import World, run_world

from resources.experiment import Experiment, load_experiment
from resources.refs import read_artifact

pytestmark = pytest.mark.slow
TINY = Path(__file__).with_name("tiny.yaml")
ROUTED = "engine={kind: routed, replicas: [{kind: builtin}, {kind: builtin}, {kind: builtin}]}"


def test_iteration_of_routed_engines_equals_that_of_one(
    tiny: Experiment, ran: World, base_world: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for world in run_world(load_experiment(TINY, [ROUTED]), 1, tmp_path_factory.mktemp("routed"), base_world):
        for asset in ("rollouts", "dataset", "checkpoint", "evaluation"):
            made, expected = (read_artifact(each.store, "tiny", asset, "0000") for each in (world, ran))
            assert made is not None and expected is not None and made.ref.digest == expected.ref.digest, asset
