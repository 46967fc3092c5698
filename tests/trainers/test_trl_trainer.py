"""TRL's GRPOTrainer learns from episodes over the bridge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainers.publishing import ROOT

pytestmark = pytest.mark.trainers
PEERS = ROOT / ".venv-peers" / "bin" / "python"


@pytest.mark.skipif(not PEERS.exists(), reason="TRL is not installed: make test-trainers installs it in .venv-peers")
@pytest.mark.timeout(900)
def test_grpo_of_trl_raises_held_out_solving(tmp_path: Path) -> None:
    import torch

    from tests.trainers.ppo_trainer import PolicyAndValue, warm_start  # late: transformers takes seconds

    torch.manual_seed(1)
    model = PolicyAndValue()
    warm_start(model, 200, seed=1)
    model.policy.save_pretrained(tmp_path / "start")
    quiet = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [str(PEERS), "-m", "tests.trainers.trl_trainer", str(tmp_path), sys.executable, "320", "1"]
    environment = {**os.environ, **quiet, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"')))
    print(f"held-out solving {found['before']:.1f}% -> {found['after']:.1f}%")
    assert found["after"] >= found["before"] + 15
