"""`python -m triplane_kernels.tune`: workers that crash or hang cost one configuration, and a run that is cut short
goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from triplane_kernels import tune, tuning
from triplane_kernels.machine import Machine

H200 = Machine("NVIDIA H200", "3.7.1", False, (9, 0), 132, gluon=True)
WORKER = """
import json, os, sys, time
order = json.load(sys.stdin)
for op, shape in order["work"]:
    for rows in (1, 2, 3):
        config = {"BLOCK_M": rows}
        if [op, config] in order["skipped"]:
            continue
        print(json.dumps({"trying": [op, config]}), flush=True)
        if (op, rows) == ("gemm", 1):
            os._exit(11)
        if (op, rows) == ("gemm", 2):
            time.sleep(600)
    if op == "route" and shape[0] == 4096:
        print(json.dumps({"failed": [op, shape], "why": "out of memory"}), flush=True)
        continue
    print(json.dumps({"done": [op, shape], "found": {op: {"x".join(map(str, shape)): config}}}), flush=True)
"""


@pytest.fixture
def gpu_with_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU would be to this process; its workers crash at the first configuration of gemm and hang at the
    second.
    """
    monkeypatch.setattr(tune, "machine", lambda: H200)
    monkeypatch.setattr(tune, "WORKER", [sys.executable, "-c", WORKER])


@pytest.mark.usefixtures("gpu_with_faults")
def test_what_crashes_or_hangs_is_skipped_and_the_rest_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.json"
    assert tune.main(["gemm", "route", "--out", str(out), "--patience", "1.5"]) == 0
    said = capsys.readouterr()
    assert "gemm {'BLOCK_M': 1}: the worker ended with status 11; skipped" in said.err
    assert "gemm {'BLOCK_M': 2}: the worker hung; skipped" in said.err
    assert "route 4096x128x8: out of memory" in said.err and "left" not in said.out
    table = json.loads(out.read_text())
    gemm, route = (tuning.WORKLOADS[op].shapes for op in ("gemm", "route"))
    assert len(table["gemm"]) == len(gemm) and set(map(str, table["gemm"].values())) == {"{'BLOCK_M': 3}"}
    assert len(table["route"]) == len(route) - 2 and len(table[tune.DONE]) == len(gemm) + len(route) - 2


@pytest.mark.usefixtures("gpu_with_faults")
def test_a_run_that_is_cut_short_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    shapes = tuning.WORKLOADS["swiglu"].shapes if tuning.WORKLOADS else tune.load_workloads()["swiglu"].shapes
    assert tune.main(["swiglu", "--out", str(out), "--seconds", "0"]) == 0
    assert f"{len(shapes)} of {len(shapes)} workloads are left" in capsys.readouterr().out and not out.exists()
    done = {f"swiglu {'x'.join(map(str, shape))}": {} for shape in shapes[1:]}
    tuning.write_table(out, {tune.DONE: done})
    assert tune.main(["swiglu", "--out", str(out)]) == 0
    assert capsys.readouterr().out.count("swiglu {") == 1
    assert list(json.loads(out.read_text())["swiglu"]) == ["x".join(map(str, shapes[0]))]
    assert tune.main(["swiglu", "--out", str(out), "--again"]) == 0
    assert capsys.readouterr().out.count("swiglu {") == len(shapes)


def test_the_worker_tells_what_fails() -> None:
    """The real worker: here there is nothing to run on."""
    done = subprocess.run(
        [sys.executable, "-m", "triplane_kernels.tune_worker"],
        input=json.dumps({"work": [["gemm", [8, 8, 8]]], "skipped": []}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["failed"] == ["gemm", [8, 8, 8]] and json.loads(line)["why"]


def test_tuning_without_a_gpu_says_what_it_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "machine", lambda: Machine("CPU", "3.7.1", False, None, 1, gluon=False))
    assert tune.main([]) == 2
    assert "CUDA GPU of compute capability 8.9" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tune.main(["no_such_op"])


def test_every_op_of_this_package_has_workloads() -> None:
    with pytest.raises(SystemExit):
        tune.main(["--help"])
    ops = {"quantize_activations", "quantize_both", "quantize_weights", "quantize_mx", "gemm", "grouped_gemm"}
    assert ops <= set(tuning.WORKLOADS)
    assert all(workload.shapes for workload in tuning.WORKLOADS.values())
