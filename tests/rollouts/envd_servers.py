"""envd servers that tests kill and start again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import grpc

ROOT = Path(__file__).parents[2]


class Server:
    """An envd server at one address that can be killed and started again, all that it made gone."""

    def __init__(self, folder: Path, *options: str, listen: str = "") -> None:
        """listen: host:port, without a key; default: a socket in the folder."""
        self.address, self._folder = listen or f"unix:{folder}/s", folder
        self._options = (*options, "--insecure") if listen else options
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        """Start it, and wait until it listens."""
        self.starts += 1
        command = [sys.executable, "-m", "envd", "serve", "--listen", self.address, "--log-level", "error"]
        command += ["--state-dir", str(self._folder / str(self.starts)), *self._options]
        (self._folder / "s").unlink(missing_ok=True)
        self.process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
        deadline = time.monotonic() + 30
        while not self._listens():
            assert self.process.poll() is None and time.monotonic() < deadline, "envd did not start"
            time.sleep(0.01)

    def _listens(self) -> bool:
        with grpc.insecure_channel(self.address) as channel:
            try:
                grpc.channel_ready_future(channel).result(timeout=0.2)
            except grpc.FutureTimeoutError:
                return False
        return True

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """Kill it, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
