"""Child processes that end with their parent, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_GRACE_S = 30.0
_libc = ctypes.CDLL(None)
"""Loaded here: between fork and exec, in a process with threads, nothing may be loaded."""


class Children:
    """Runs commands to their end; `stop` ends those that still run, from any thread."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._starting = threading.Lock()

    def run(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Append what the command prints to `log` and return its exit status; -1 after `stop`."""
        with self._starting, log.open("ab") as file:
            if self._stopped:
                return -1
            child = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                env=dict(environment),
                preexec_fn=partial(_die_with_parent, os.getpid()),
            )
            self._running.add(child)
        try:
            return child.wait()
        finally:
            self._running.discard(child)

    def stop(self) -> None:
        """Ask every child to end, and start no more."""
        with self._starting:
            self._stopped = True
        for child in list(self._running):
            child.terminate()
        for child in list(self._running):
            try:
                child.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()


def _die_with_parent(parent: int) -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if os.getppid() != parent:  # it died before the kernel was asked to watch it
        os.kill(os.getpid(), signal.SIGTERM)
