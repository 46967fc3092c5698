"""End a trainer when its launcher dies. Requires Linux; on other systems the trainer keeps running."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

from contracts.owned import fate_of_owner
from trainer.errors import TrainingStopped

PARENT_VARIABLE = "TRIPLANE_TRAINER_PARENT"
"""Environment variable with the pid of the launcher, for a trainer that must end with it."""
MEETING_VARIABLE = "TRIPLANE_RANKS_FILE"
"""Environment variable with the path of the file through which the ranks of `trainer.agent` find each other."""
ANCESTOR_VARIABLE = "TRIPLANE_TRAINER_ANCESTOR"
"""Environment variable with `contracts.owned.owned_name()` of a process that is not the parent, and with which a
trainer must end.
"""
_PR_SET_PDEATHSIG = 1
_POLL_S, _GRACE_S = 1.0, 5.0


def end_with_parent() -> None:
    """Request SIGTERM on the launcher's death, if the launcher asked for it. Raises TrainingStopped if it is already
    dead.

    The trainer itself makes the request, since code between fork and exec is unsafe in a launcher with threads.
    """
    ancestor = os.environ.get(ANCESTOR_VARIABLE)
    if ancestor is not None:
        threading.Thread(target=_end_with, args=(ancestor,), name="trainer-lifetime", daemon=True).start()
    launcher = os.environ.get(PARENT_VARIABLE)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if str(os.getppid()) != launcher:  # the launcher died before the request
        raise TrainingStopped(signal.SIGTERM)


def _end_with(ancestor: str) -> None:
    """Wait for the end of a process, then end this one, even while it waits for another rank in native code."""
    while fate_of_owner(ancestor) != "gone":
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE_S)
    os._exit(128 + signal.SIGTERM)
