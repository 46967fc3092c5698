"""Two iterations of the tiny experiment that record and replay the sampler's routing, trained by two ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from dagster_world import World, run_world

from contracts.artifacts import list_artifacts, open_artifact
from contracts.episodes import ROUTED_EXPERTS, SEQUENCES
from contracts.routing import decode_routes
from resources.experiment import load_experiment
from resources.refs import require_ref

pytestmark = pytest.mark.slow

TINY = Path(__file__).parent / "tiny.yaml"
SWITCHES = [
    "rollouts.record_routing=true",
    "trainer.routing_replay=true",
    "base.model.experts=4",
    "trainer.launcher.ranks=2",
]


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    yield from run_world(load_experiment(TINY, SWITCHES), 2, tmp_path_factory.mktemp("replayed"))


def test_routing_goes_from_the_sampler_to_the_trainers_metrics(replayed: World) -> None:
    store, name = replayed.store, replayed.experiment.name
    assert replayed.made == ["0000", "0001"]
    for iteration in replayed.made:
        made = {
            asset: open_artifact(store, require_ref(store, name, asset, iteration))
            for asset in ("rollouts", "dataset", "checkpoint")
        }
        rows = made["dataset"].table("train.parquet").to_pylist()
        assert rows
        for row in rows:
            last = max(place for place, role in enumerate(row["token_role"]) if role == 1)
            assert decode_routes(row[ROUTED_EXPERTS.name]).shape == (last, 1, 1)
        assert made["rollouts"].table("sequences.parquet", SEQUENCES.names).schema.names == SEQUENCES.names
        metrics = [json.loads(line) for line in made["checkpoint"].path("metrics.jsonl").read_text().splitlines()]
        steps = [record for record in metrics if "loss" in record]
        assert sum(record["replayed_tokens"] + record["unrecorded_tokens"] for record in steps) == sum(
            len(row["token_ids"]) for row in rows
        )
        # the engine and the trainer choose alike until the first optimizer step
        assert steps[0]["replayed_tokens"] > 0 and steps[0]["rerouted_fraction"] < 0.01
        assert metrics[0]["sampler_mismatch_max"] < 1e-5


def test_evaluations_record_no_routing(replayed: World) -> None:
    for run in list_artifacts(replayed.store, "evaluation_run"):
        assert run.table("sequences.parquet").schema.names == SEQUENCES.names


def test_two_ranks_trained_base_and_checkpoint(replayed: World) -> None:
    for asset, iteration in (("base_policy", None), ("checkpoint", "0000"), ("checkpoint", "0001")):
        ref = require_ref(replayed.store, replayed.experiment.name, asset, iteration)
        assert open_artifact(replayed.store, ref).manifest.config["numerics"]["ranks"] == 2
