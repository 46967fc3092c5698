"""TRL's GRPOTrainer learns quickstart's tasks from hosted episodes over the bridge."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.trainers.conftest import Quickstart
from tests.trainers.publishing import ROOT

pytestmark = pytest.mark.trainers
PEERS = ROOT / ".venv-peers" / "bin" / "python"


@pytest.mark.skipif(not PEERS.exists(), reason="TRL is not installed: make test-trainers installs it in .venv-peers")
@pytest.mark.timeout(3600)
def test_grpo_of_trl_raises_held_out_solving(quickstart: Quickstart, tmp_path: Path) -> None:
    quickstart.write(tmp_path / "quickstart.json")
    quiet = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [str(PEERS), "-m", "tests.trainers.trl_trainer", str(tmp_path)]
    environment = {**os.environ, **quiet, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"')))
    print(f"held-out solving {found['before']:.1f}% -> {found['after']:.1f}%")
    assert found["after"] >= found["before"] + 15
