"""An engine's server as a child process that ends with this one: start, last output, end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from contracts import tracing
from contracts.owned import socket_directory

GUARD = Path(__file__).with_name("server_guard.py")
STOP_S = 5.0
"""Seconds for a server to exit after the request to stop."""
SCRATCH = "triplane-engine-"
"""Prefix of the names of servers' temporary folders."""
_SOCKET_NAME = 36
"""Bytes of a socket's name in vLLM."""
_TAIL_LINES = 12


class GuardedServer:
    """A running server with its guard (server_guard), which ends with this process."""

    def __init__(
        self, command: Sequence[str], environment: Callable[[Path], Mapping[str, str]], locks: Sequence[IO[str]] = ()
    ) -> None:
        """environment: of the server, by its temporary folder. locks: open files that are held until the last process
        of the server is gone.
        """
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (read until we end; it has no name to remove)
        self._scratch = scratch = socket_directory(SCRATCH, _SOCKET_NAME)
        guard = [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), str(scratch), str(STOP_S), "--"]
        try:
            self._guard = subprocess.Popen(
                [*guard, *command],
                env={**environment(scratch), **tracing.environment()},
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
                pass_fds=[each.fileno() for each in locks],
            )
        except OSError:
            shutil.rmtree(scratch, ignore_errors=True)
            raise

    @property
    def alive(self) -> bool:
        """Whether the server is running, even if it is not ready."""
        return self._guard.poll() is None

    def stop(self) -> None:
        """Stop the server and all of its processes. Idempotent."""
        if self.alive:
            self._guard.send_signal(signal.SIGTERM)
        self._guard.wait()
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        shutil.rmtree(self._scratch, ignore_errors=True)  # needed if the guard was killed

    def last_words(self) -> str:
        """End of the server's log, as one line."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        telling = [line for line in lines if "Error" in line or "error:" in line][-3:]
        return " | ".join(telling or lines[-_TAIL_LINES:])[-1500:] or "no output"


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
