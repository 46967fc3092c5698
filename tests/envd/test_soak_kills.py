"""A short soak: clients, spawner and server are killed, and nothing is left. `python -m benchmarks envd-soak` runs
20,000 sandboxes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_nothing_is_left_after_kills_of_clients_spawner_and_server() -> None:
    # a process of its own: it adopts orphans
    command = [sys.executable, "-m", "benchmarks", "envd-soak", "--count", "300", "--every", "50", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["passed"], [goal for goal in found["goals"] if not goal["met"]] + found["notes"]
    metrics = found["metrics"]
    assert metrics["sandboxes"] >= 300
    assert min(metrics[f"kills_of_{victim}"] for victim in ("client", "spawner", "server")) >= 1
