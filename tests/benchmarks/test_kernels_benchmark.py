"""The benchmark of the kernels where there is nothing to measure, and its smoke run."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.goals import load_goals


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_gpu_one_line_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "no CUDA device" in said.err and "--smoke" in said.err


@pytest.mark.slow
def test_a_smoke_run_computes_every_case_right_and_judges_nothing() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks", "kernels", "--smoke", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["goals"] == [] and found["metrics"] == {"wrong_results": 0.0}
    assert all(row["right"] for row in found["rows"])
    kernels = {row["kernel"].partition(",")[0] for row in found["rows"]}
    named = {
        "quantize 1x128",
        "quantize 128x128",
        "permute",
        "unpermute",
        "SwiGLU",
        "route",
        "FP8 product",
        "loss head",
        "expert layer",
    }
    assert named | {f"grouped {product}" for product in ("forward", "dgrad", "wgrad")} <= kernels
    assert len(load_goals()["kernels"]) > 10
