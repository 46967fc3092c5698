"""Every kernel, as it is launched where nothing can be searched, compiles to an H200's machine code on this CPU, and
what the assembler says of it is good.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NO_TRITON = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton")
OUTSIDE_THE_MATRIX_UNITS = ("float32", "odd sizes", "ones")
"""Cases whose products run by fused multiply-adds or by pointers: right, not fast."""


def compiled(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "TRIPLANE_KERNELS")
    }
    return subprocess.run(
        [sys.executable, "-m", "triplane_kernels.compiled", *arguments],
        capture_output=True,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        timeout=290,
        check=False,
    )


@pytest.mark.slow
@NO_TRITON
def test_kernels_compile_for_an_h200(tmp_path: Path) -> None:
    done = compiled(tmp_path, "--json", "--first")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines and not any(line["refused"] for line in lines)
    fast = [line for line in lines if not any(part in line["case"] for part in OUTSIDE_THE_MATRIX_UNITS)]
    for line in fast:
        assert line["shared"] <= 227 * 1024 and not line["serialized"] and line["blocks"] >= 1, line
        # no recipe rounds stochastically: random numbers and quotients of a block together take all registers
        assert line["stack"] <= (48 if line["case"] == "quantize, stochastic" else 0), line
    products = [line for line in fast if line["case"].startswith(("grouped", "product", "loss head"))]
    assert products and all(line["matrix"] and line["copies"] == "TMA" for line in products), "no wgmma or no TMA"
    kinds = {kind.partition(".")[2] for line in products for kind in line["matrix"]}
    assert kinds == {"f32.e4m3.e4m3", "f32.bf16.bf16"}
    moving = [
        line for line in fast if line["kernel"] in ("_both_kernel", "_mx_kernel", "_scatter_kernel", "_gather_kernel")
    ]
    assert moving and all(line["load_bits"] == line["store_bits"] == 128 for line in moving), moving


@pytest.mark.slow
@NO_TRITON
def test_the_table_is_written_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- compiled: begin -->\nold\n<!-- compiled: end -->\nafter\n")
    assert compiled(tmp_path, "router", "--write", str(page)).returncode == 2
    done = compiled(tmp_path, "route", "--first", "--write", str(page))
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| route | `_route_kernel` | T=8 warps=4 |" in text
