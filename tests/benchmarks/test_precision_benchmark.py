"""The `precision` benchmark trains both recipes; without a GPU it says so."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks.precision import PrecisionOptions, run
from benchmarks.result import NotHereError

pytestmark = pytest.mark.slow

TINY = {
    "layers": 1,
    "hidden": 128,
    "experts": 2,
    "expert_width": 128,
    "picks": 1,
    "heads": 1,
    "vocabulary": 64,
    "sequences": 8,
    "length": 32,
    "steps": 6,
    "learning_rate": 1e-2,
}


def test_both_recipes_learn_the_same_on_a_cpu() -> None:
    result = run(PrecisionOptions(device="cpu", repeats=2, **TINY))
    assert not result.judged
    assert [row["recipe"] for row in result.rows] == ["bf16", "fp8-block"] * 2
    for row in result.rows:
        assert row["loss at the end"] < row["first loss"] - 0.1 and row["tokens/s"] > 0
    assert 0 < result.metrics["loss_gap_percent"] < 5
    assert 0 < result.metrics["bf16_loss_spread_percent"] < 5
    assert math.isnan(result.metrics["recipe_peak_gib"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_it_says_how_to_run() -> None:
    with pytest.raises(NotHereError, match=r"no CUDA device.*--device cpu"):
        run(PrecisionOptions(**TINY))
