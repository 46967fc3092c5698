"""A checkpoint of 3 GB is written, verified and loaded in memory bounded by its largest part."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import VLLM_PYTHON

SCRIPT = Path(__file__).with_name("large_checkpoint.py")
IN_VLLM = SCRIPT.with_name("large_in_vllm.py")
MB = 10**6


@pytest.mark.large
@pytest.mark.timeout(3600)
def test_3_gb_in_parts_of_512_mb_take_the_memory_of_one_part(tmp_path: Path) -> None:
    def run(step: str) -> dict[str, Any]:
        return program(step, sys.executable, SCRIPT, step, tmp_path / "store")

    def program(step: str, *command: str | Path) -> dict[str, Any]:
        done = subprocess.run(
            [str(each) for each in command],
            env={**os.environ, "TRIPLANE_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        print(step, done.stdout.strip())
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    written = run("write")
    assert written["bytes"] > 3000 * MB and written["parts"] >= 6 and written["largest"] <= 512 * MB
    bound = written["largest"] + 100 * MB
    assert written["peak"] <= bound
    assert run("verify")["peak"] <= 100 * MB, "files are hashed as streams, headers are read alone"
    loaded = run("engine")
    assert loaded["peak"] <= loaded["model"] + bound
    plain = run("plain")
    assert plain["peak"] <= bound
    read = run("transformers")
    assert read["missing"] == read["unexpected"] == []
    assert VLLM_PYTHON.exists(), f"{VLLM_PYTHON} is missing: run `make test-large`, which builds it"
    served = program("vllm", VLLM_PYTHON, IN_VLLM, plain["directory"])
    # vLLM maps a part and copies a tensor of it; the largest one is half a part
    assert served["same"] and served["peak"] <= served["model"] + bound + written["largest"] // 2
