"""The benchmark of the kernels keeps what it has measured when a part crashes, hangs or finds no time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import kernels, kernels_process
from benchmarks.kernels_case import Case, Measured
from benchmarks.kernels_clock import Clock
from benchmarks.kernels_parts import PARTS, _measure_case, chosen_parts
from contracts.errors import ConfigError

PROCESS = """
import json, os, sys, time
order, part = json.load(sys.stdin), sys.argv[1]
def tell(metrics, **row):
    print(json.dumps({"row": row or None, "metrics": metrics, "best": False, "notes": []}), flush=True)
if part == "ceilings":
    tell({"copy_tb_per_s": 4.0})
elif part == "router":
    tell({"a": order["ceilings"]["copy_tb_per_s"]}, kernel="route", right=True)
    print("an illegal memory access", file=sys.stderr, flush=True)
    os._exit(7)
elif part == "activation":
    tell({"a": 3.0}, kernel="swiglu", right=False, error=float("nan"))
    time.sleep(600)
else:
    tell({"a": 5.0}, kernel=part, right=True)
"""


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of which two go wrong, in place of those that measure on a GPU."""
    monkeypatch.setattr(kernels_process, "COMMAND", [sys.executable, "-c", PROCESS])


@pytest.mark.usefixtures("faulty")
def test_a_part_that_crashes_or_hangs_costs_its_rest_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = kernels.KernelOptions(patience=1.5, rows=tmp_path / "rows.jsonl")
    notes: list[str] = []
    parts = ["router", "activation", "quantizers"]
    result = kernels._collected(kernels._apart(parts, options, notes), notes, options, judged=True)
    assert [row["kernel"] for row in result.rows] == ["route", "swiglu", "quantizers"]
    assert result.metrics == {"copy_tb_per_s": 4.0, "a": 3.0, "wrong_results": 1.0}
    crashed, hung = result.notes
    assert "router" in crashed and "status 7" in crashed and "an illegal memory access" in crashed
    assert "activation" in hung and "no result in 1.5 seconds" in hung
    kept = [json.loads(line) for line in options.rows.read_text().splitlines()] if options.rows else []
    assert kept == list(result.rows) and kept[1]["error"] == "nan"
    assert capsys.readouterr().err.count("\n") == 3


@pytest.mark.usefixtures("faulty")
def test_when_the_time_is_over_what_is_left_is_named() -> None:
    options, notes = kernels.KernelOptions(seconds=1.5), []
    found = list(kernels._apart(["activation", "router", "quantizers"], options, notes))
    assert len(found) == 2
    assert "activation: time limit reached" in notes[0] and "not measured: router, quantizers; --only" in notes[1]


def test_parts_are_chosen_by_pieces_of_their_names() -> None:
    assert chosen_parts("") == list(PARTS)
    assert chosen_parts("loss, qwen down") == ["grouped qwen down", "loss head"]
    with pytest.raises(ConfigError, match=r"--only=loss,gemv: no part has 'gemv' in its name: quantizers"):
        chosen_parts("loss,gemv")


def test_what_stands_beside_may_fail_and_the_kernel_is_measured() -> None:
    def lacking() -> object:
        raise AttributeError("no ScalingType")

    case = Case("copy", "4", lambda: torch.ones(4), 4.0, "TB/s", lambda: 0.0, 0.0, "rate", peers={"theirs": lacking})  # type: ignore[dict-item]
    found = _measure_case(case, Clock(torch.device("cpu"), 1, 0), {})
    assert found.row is not None and found.row["right"] and found.metrics["rate"] > 0
    assert found.notes == ("copy, 4: theirs does not run here: no ScalingType",)
    assert Measured.from_json(found.to_json()).row == found.row
