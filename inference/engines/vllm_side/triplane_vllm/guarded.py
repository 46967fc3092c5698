"""A worker, and the engine process it belongs to, end with the guard of their server, also when that was killed."""

from __future__ import annotations

import os
import select
import signal
import threading
from pathlib import Path

ENGINE = "VLLM::Engine"
"""Begins the name that vLLM gives its engine process. It may be the worker's parent or the worker itself, and outlives
both its ends.
"""


def end_with_guard() -> None:
    """Watch the process that $TRIPLANE_VLLM_GUARD names, where it names one."""
    guard = os.environ.get("TRIPLANE_VLLM_GUARD")
    if guard is not None:
        threading.Thread(target=_watch, args=(int(guard),), name="guard-watch", daemon=True).start()


def _watch(guard: int) -> None:
    try:
        select.select(
            [os.pidfd_open(guard)], [], []
        )  # readable once it ended, also before anyone asked for its exit code
    except ProcessLookupError:
        pass
    engine = os.getppid()
    if Path(f"/proc/{engine}/comm").read_text().startswith(ENGINE):
        os.kill(engine, signal.SIGKILL)
    os._exit(1)
