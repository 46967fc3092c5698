"""A private envd server as a child process, for tests, the quickstart and workers that have none to talk to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Literal

from envd.errors import BackendUnavailable

_START_TIMEOUT_S = 90.0


class LocalEnvd:
    """Starts a server on a unix socket of its own and stops it at the end of the `with` block.

    The server also ends when this process dies, however it dies. Keep it in the thread that entered the block:
    the kernel ties the child to that thread.
    """

    def __init__(self, backend: Literal["auto", "namespaces", "plain"] = "auto", *, log_level: str = "warning") -> None:
        self._backend = backend
        self._log_level = log_level
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where the server listens, for `SandboxClient`."""
        if self._directory is None:
            raise BackendUnavailable("LocalEnvd is not running: use it as `with LocalEnvd() as envd`")
        return f"unix:{self._directory}/envd.sock"

    @property
    def alive(self) -> bool:
        """Whether the server runs. One that was killed does not come back: enter another."""
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> LocalEnvd:
        self._directory = Path(tempfile.mkdtemp(prefix="envd-local-"))
        options = ["--listen", self.address, "--state-dir", str(self._directory), "--backend", self._backend]
        options += ["--log-level", self._log_level, "--with-parent", str(os.getpid())]
        root = Path(__file__).resolve().parent.parent
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "envd", "serve", *options],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _wait_until_ready(self) -> None:
        assert self._process is not None and self._directory is not None
        socket_file = self._directory / "envd.sock"
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not socket_file.exists():
            code = self._process.poll()
            if code is not None:
                raise BackendUnavailable(f"envd ended with code {code} while it started; its last lines say why")
            if time.monotonic() > deadline:
                raise BackendUnavailable(f"envd was not ready after {_START_TIMEOUT_S:g} s")
            time.sleep(0.01)

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
