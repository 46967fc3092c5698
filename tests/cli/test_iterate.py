"""`triplane demo` as a newcomer runs it, on an experiment small enough for a test: interrupted, resumed, read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TINY = """
name: tiny
iterations: 1
tasks: {train: 12, gate: 4, held_out: 4, unseen: 4}
evaluation: {held_out_samples: 2, unseen_samples: 2}
base:
  demonstrations: {count: 200, validation_count: 32}
  sft: {max_steps: 10, evaluate_every: 10, evaluation_episodes: 16, probe_episodes: 16}
prompts: {groups: 2, reserve: 1}
rollouts: {group_size: 2, max_turns: 3}
trainer: {optimizer_steps: 2, launcher: {threads: 1}}
"""


def environment(folder: Path) -> dict[str, str]:
    """Everything below `folder`."""
    (folder / "experiments").mkdir()
    (folder / "experiments" / "tiny.yaml").write_text(TINY)
    (folder / "dagster").mkdir()
    (folder / "dagster" / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TRIPLANE_EXPERIMENTS": str(folder / "experiments"),
        "TRIPLANE_STORE": str(folder / "store"),
        "DAGSTER_HOME": str(folder / "dagster"),
    }


@pytest.mark.slow
def test_demo_survives_an_interrupt_and_ends_with_the_table(tmp_path: Path) -> None:
    place = environment(tmp_path)
    command = [sys.executable, "-m", "triplane_dagster.cli", "demo", "-e", "tiny", "--json"]
    first = subprocess.Popen(command, env=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not list(tmp_path.glob("store/artifacts/task_suite/*/manifest.json")) and time.monotonic() < until:
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    _, said = first.communicate(timeout=60)
    assert first.returncode == 130, said
    assert "Traceback" not in said and "continue with" in said

    done = subprocess.run(command, env=place, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (iteration,) = found["iterations"]
    assert iteration["decision"] in ("live", "refused")
    assert set(iteration["pass_rates"]) == {"gate", "held_out", "unseen"}
    for split in ("held_out", "unseen"):
        for own in (*iteration["measures"][split].values(), found["base"]["measures"][split]):
            assert (own["k"], own["temperature"], own["greedy"]["tasks"]) == (2, 1.0, 4)
            assert own["greedy"]["rate"] is not None and own["any"]["rate"] >= own["majority"]["rate"]
    assert iteration["seconds"]["rollouts"] > 0 and found["base"]["seconds"]["base_policy"] > 0

    again = subprocess.run(command, env=place, capture_output=True, text=True, timeout=120, check=False)
    assert json.loads(again.stdout)["iterations"][0]["policy"] == iteration["policy"]
    assert again.stderr == ""
    other = subprocess.run(
        [*command, "--set", "seed=1"], env=place, capture_output=True, text=True, timeout=120, check=False
    )
    assert json.loads(other.stdout)["iterations"][0]["policy"] == iteration["policy"]
    (warning,) = other.stderr.splitlines()
    assert warning.startswith("warning: base_policy, prompts, rollouts, checkpoint, evaluation of tiny")
