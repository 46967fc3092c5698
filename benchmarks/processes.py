"""Child processes that end with their parent, even if it is killed."""

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
"""Loaded here, since a process with threads must not load libraries between fork and exec."""


class Children:
    """Runs commands to their end; `stop` ends running ones, from any thread."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._starting = threading.Lock()

    def run(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
        """Run a command, append its output to `log` and return its exit status; -1 after `stop`."""
        with self._starting, log.open("ab") as file:
            if self._stopped:
                return -1
            child = subprocess.Popen(
                command,
                stdout=file,
                stderr=file,
                stdin=subprocess.DEVNULL,
                env=dict(environment),
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
            self._running.add(child)
        try:
            return child.wait()
        finally:
            self._running.discard(child)

    def stop(self) -> None:
        """Send all children a signal to end, and start no more."""
        with self._starting:
            self._stopped = True
        for child in list(self._running):
            child.terminate()
        for child in list(self._running):
            try:
                child.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()


def die_with_parent(parent: int) -> None:
    """Let this process end with its parent. Also runs between fork and exec."""
    _libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
    if os.getppid() != parent:  # the parent died before the request
        os.kill(os.getpid(), signal.SIGTERM)
