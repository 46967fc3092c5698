"""Run a script on several ranks of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def torchrun(script: Path, ranks: int, folder: Path) -> str:
    """The script's output. folder: for the report of an error, which fails the test."""
    # Else ranks wait for the machine's own name to resolve, which not every network does.
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHELASTIC_ERROR_FILE": str(folder / "error.json")}
    command = [*run, f"--nproc-per-node={ranks}", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
