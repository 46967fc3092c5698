"""Every kernel, as it is launched where nothing can be searched, compiles to an H200's machine code on this CPU, and what the assembler says of it is good."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "hopper_compile.py"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton")
def test_kernels_compile_for_an_h200(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRIPLANE_KERNELS": "triton", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--json", "--first"], capture_output=True, text=True, env=environment, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for line in lines:
        # a few bytes of stack are a few registers that outlive a loop; a spilled accumulator is hundreds
        assert line["shared"] <= 227 * 1024 and not line["serialized"] and line["stack"] <= 64, line
    products = [line for line in lines if "gemm" in line["op"]]
    assert products and all(line["matrix"] for line in products), "a product without Hopper's matrix instructions"
    kinds = {kind.partition(".")[2] for line in products for kind in line["matrix"]}
    assert kinds == {"f32.e4m3.e4m3", "f32.bf16.bf16"}
