"""End a trainer with the process that launched it. Requires Linux; elsewhere the trainer outlives it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from trainer.errors import TrainingStopped

PARENT_VARIABLE = "TRIPLANE_TRAINER_PARENT"
"""Names the launcher's pid in the environment of a trainer that is to end with it."""
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Request SIGTERM for the death of the launcher, if one asked for it. Raises TrainingStopped if it is already gone.

    Asked for by the trainer itself, since code between fork and exec is unsafe in a launcher that has threads.
    """
    launcher = os.environ.get(PARENT_VARIABLE)
    if launcher is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if str(os.getppid()) != launcher:  # it died before the kernel was asked to watch it
        raise TrainingStopped(signal.SIGTERM)
