"""Configure the process for deterministic bits at full speed."""

from __future__ import annotations

import ctypes
import ctypes.util
import random
import sys

import numpy as np
import torch
from triplane_kernels.cpu import resolve_kernels

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEEP = 1 << 30


def make_deterministic(seed: int, threads: int, device: torch.device) -> None:
    """Fix seeds and thread count for the whole process, and on a CPU the algorithms. On a GPU sums may differ between
    runs by their rounding: torch has no deterministic variant of all that is used.
    """
    torch.set_num_threads(threads)
    resolve_kernels()
    # Equals torch.use_deterministic_algorithms(True) without importing the compiler, which takes over a second per
    # start.
    torch._C._set_deterministic_algorithms(device.type == "cpu", warn_only=False)
    # Deterministic mode also fills fresh memory with NaN to expose bugs; nothing here reads uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def keep_freed_memory() -> None:
    """Make glibc reuse large freed blocks instead of returning them to the kernel: training frees the same sizes every
    step.
    """
    if not sys.platform.startswith("linux"):
        return
    library = ctypes.CDLL(ctypes.util.find_library("c"))
    if hasattr(library, "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, _KEEP)
        library.mallopt(_M_TRIM_THRESHOLD, _KEEP)
