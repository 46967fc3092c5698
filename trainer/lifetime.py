"""End a trainer when its launcher dies. Requires Linux; on other systems the trainer keeps running."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from trainer.errors import TrainingStopped

PARENT_VARIABLE = "TRIPLANE_TRAINER_PARENT"
"""Environment variable with the pid of the launcher, for a trainer that must end with it."""
MEETING_VARIABLE = "TRIPLANE_RANKS_FILE"
"""Environment variable with the path of the file through which the ranks of `trainer.agent` find each other."""
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Request SIGTERM on the launcher's death, if the launcher asked for it. Raises TrainingStopped if it is already
    dead.

    The trainer itself makes the request, since code between fork and exec is unsafe in a launcher with threads.
    """
    launcher = os.environ.get(PARENT_VARIABLE)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if str(os.getppid()) != launcher:  # the launcher died before the request
        raise TrainingStopped(signal.SIGTERM)
