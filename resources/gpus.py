"""NVIDIA GPUs of this machine, as their driver lists them. Imports neither torch nor CUDA."""

from __future__ import annotations

import os
import subprocess

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""Comma-separated numbers or ids of the GPUs that this process may use; unset: all."""
_COMMAND = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]


def local_gpus() -> list[tuple[str, int]]:
    """(name, bytes of memory) of each GPU that this process may use; empty without a driver."""
    try:
        done = subprocess.run(_COMMAND, capture_output=True, text=True, timeout=20, check=True)
        rows = [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.count(",") == 3]
        found = [(index, uuid, name, int(mebibytes) << 20) for index, uuid, name, mebibytes in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    visible = os.environ.get(VISIBLE)
    if visible is None:
        return [(name, size) for _, _, name, size in found]
    chosen = []
    for wanted in visible.split(","):
        own = [(name, size) for index, uuid, name, size in found if wanted.strip() == index or _is_id(wanted, uuid)]
        if not own:  # CUDA ignores what follows an unknown one
            break
        chosen += own
    return chosen


def _is_id(wanted: str, uuid: str) -> bool:
    """Whether `wanted` is the id of a GPU or the begin of it."""
    return wanted.strip().startswith("GPU-") and uuid.startswith(wanted.strip())
