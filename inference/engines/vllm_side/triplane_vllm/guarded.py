"""End a worker and its engine process when the guard of their server ends, even if the guard was killed."""

from __future__ import annotations

import os
import select
import signal
import threading
from pathlib import Path

ENGINE = "VLLM::Engine"
"""Prefix of the name of vLLM's engine process, which may be the worker or its parent, and does not end with its server
by itself.
"""


def end_with_guard() -> None:
    """Watch the process in $TRIPLANE_SERVER_GUARD, if it is set."""
    guard = os.environ.get("TRIPLANE_SERVER_GUARD")
    if guard is not None:
        threading.Thread(target=_watch, args=(int(guard),), name="guard-watch", daemon=True).start()


def _watch(guard: int) -> None:
    try:
        select.select([os.pidfd_open(guard)], [], [])  # readable after its exit, even before its parent reaps it
    except ProcessLookupError:
        pass
    engine = os.getppid()
    if Path(f"/proc/{engine}/comm").read_text().startswith(ENGINE):
        os.kill(engine, signal.SIGKILL)
    os._exit(1)
