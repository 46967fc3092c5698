"""A driver in a process of its own, to be killed: `python -m tests.kubernetes.driver KEY STORE WORKLOAD COMMAND`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from contracts.store import open_store
from resources.launch import Launch
from resources.placement import TrainerPlacement
from resources.training_logs import kept_logs
from tests.kubernetes.trainings import launch_as_job

ROOT = Path(__file__).parents[2]


def start_driver(key: str, store: str, command: list[str], workload: str = "job") -> subprocess.Popen[str]:
    """Launch a command in another process."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kubernetes.driver", key, store, workload, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/kernels"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


if __name__ == "__main__":
    key, store, workload, *command = sys.argv[1:]
    opened = open_store(store)
    launch = Launch(
        command,
        key=key,
        experiment="tiny",
        store=opened,
        placement=TrainerPlacement.model_validate({"workload": workload}),
        is_done=lambda: bool(kept_logs(opened, key)),
    )
    print(json.dumps(launch_as_job(launch)))
