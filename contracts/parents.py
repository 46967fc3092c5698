"""End a process of `multiprocessing` with the one that started it."""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.connection import wait


def end_with_parent() -> None:
    """End this process at once when its parent has ended, for whatever reason."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process was started by another"
    threading.Thread(target=_end_after, args=(parent.sentinel,), name="lifetime", daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)
