"""Two iterations of the tiny experiment under a grammar and a nucleus: what the sampler drew from, the trainer sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from dagster_world import World, run_world

from contracts.artifacts import open_artifact
from contracts.episodes import SUPPORTS, TokenRole
from contracts.supports import WHOLE, decode_supports
from resources.experiment import load_experiment
from resources.refs import require_ref

pytestmark = pytest.mark.slow

TINY = Path(__file__).parent / "tiny.yaml"


@pytest.fixture(scope="module")
def restricted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    switches = ["rollouts.grammar=true", "rollouts.top_p=0.95"]
    yield from run_world(load_experiment(TINY, switches), 2, tmp_path_factory.mktemp("restricted"))


def test_supports_go_from_the_sampler_to_the_trainers_log_probabilities(restricted: World) -> None:
    store, name = restricted.store, restricted.experiment.name
    assert restricted.made == ["0000", "0001"]
    for iteration in restricted.made:
        rollouts, dataset, checkpoint = (
            open_artifact(store, require_ref(store, name, asset, iteration))
            for asset in ("rollouts", "dataset", "checkpoint")
        )
        episodes = rollouts.table("episodes.parquet").to_pylist()
        assert not any(each["format_errors"] for each in episodes)
        rows = dataset.table("train.parquet").to_pylist()
        assert rows
        for row in rows:
            supports, tokens = decode_supports(row[SUPPORTS.name]), np.array(row["token_ids"])
            assert supports.fault(tokens, 768) is None
            own = np.isin(row["token_role"], [TokenRole.POLICY, TokenRole.FORCED])
            assert (supports.numbers[~own] == WHOLE).all() and (supports.numbers[own] != WHOLE).any()
            for role, value in zip(row["token_role"], row["logprobs"], strict=True):
                assert (value is None) == (role != TokenRole.POLICY)
        metrics = [json.loads(line) for line in checkpoint.path("metrics.jsonl").read_text().splitlines()]
        assert metrics[0]["sampler_mismatch_max"] < 1e-5  # over the whole vocabulary it is beyond 0.05
