"""Tensor files on a disk that refuses them: the system's own error, and one line for the user."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FILL = """
import sys, torch
from pathlib import Path
from contracts.store import LocalStore
from contracts.errors import StoreError
from trainer.state import TrainerState, publish_state
store = LocalStore(Path(sys.argv[1]))
state = TrainerState({"weight": torch.zeros(1_000_000)}, {}, "none", 1, {})
try:
    publish_state(store, "trainer_state", "a" * 64, state, parents={}, config={}, code_version="1")
except StoreError as error:
    print(error)
print(list(store.list("")), list(store.scratch.iterdir()))
"""


@pytest.mark.slow
def test_a_disk_that_fills_under_a_trainer_state_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    small = f'mount -t tmpfs -o size=1m none {tmp_path} && exec {sys.executable} -c "$1" {tmp_path}/store'
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", small, "sh", FILL],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("no user namespace to mount a small disk in")
    said, left = done.stdout.splitlines()
    assert said.startswith(f"store's folder {tmp_path}/store") and "is full: free some space" in said, done.stderr
    assert left == "[] []"
