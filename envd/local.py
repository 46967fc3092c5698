"""A private envd server as a child process, for tests, the quickstart and workers that have none to talk to."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from contracts.owned import socket_directory
from envd.errors import BackendUnavailable
from envd.sandbox.cgroups import OWNED, remove_groups

TRUSTED = (
    "quotas: {templates: 1048576, template_mb: 65536, sandboxes: 65536, snapshot_mb: 1048576, memory_mb: 1073741824}"
)
"""The rules of a server whose one client is trusted: quotas have nobody to protect, and a suite may have many
gigabytes of templates.
"""
_START_TIMEOUT_S = 90.0
_PROBE_S = 1.0
_END_S = 20.0
_SOCKET = "envd.sock"
_ROOM = 1 << 20
"""Bytes that a server needs at least for templates: with less it would start, and every sandbox fail."""


class LocalEnvd:
    """Starts a server on a unix socket of its own and stops it at the end of the `with` block.

    The server also ends when this process dies, however it dies. Keep it in the thread that entered the block:
    the kernel ties the child to that thread.
    """

    def __init__(
        self, backend: str = "auto", *, log_level: str = "warning", rules: str = "", options: Sequence[str] = ()
    ) -> None:
        """backend: as `--backend` takes it. rules: YAML (docs/sandboxes-rules.md). options: further arguments of `envd
        serve`.
        """
        self._backend, self._rules, self._options = backend, rules, tuple(options)
        self._log_level = log_level
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._was_ready = False

    @property
    def address(self) -> str:
        """Where the server listens, for `SandboxClient`."""
        if self._directory is None:
            raise BackendUnavailable("LocalEnvd is not running: use it as `with LocalEnvd() as envd`")
        return f"unix:{self._directory}/{_SOCKET}"

    @property
    def alive(self) -> bool:
        """Whether the server runs. One that was killed does not come back: enter another."""
        return self._process is not None and self._process.poll() is None and self._listens()

    def __enter__(self) -> LocalEnvd:
        self._directory = socket_directory(OWNED, len(_SOCKET))
        if shutil.disk_usage(self._directory).free < _ROOM:
            place = self._directory.parent
            self._stop()
            raise BackendUnavailable(
                f"envd did not start: No space left on device: {place} has less than {_ROOM >> 20} MiB; free some space"
                " there, or point TMPDIR elsewhere"
            )
        options = ["--listen", self.address, "--state-dir", str(self._directory), "--backend", self._backend]
        if self._rules:
            rules = self._directory / "rules.yaml"
            rules.write_text(self._rules)
            options += ["--policy", str(rules)]
        options += [*self._options, "--log-level", self._log_level, "--with-parent", str(os.getpid())]
        root = Path(__file__).resolve().parent.parent
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        reader, writer = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "envd", "serve", *options, "--failure-fd", str(writer)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
            pass_fds=[writer],
        )
        os.close(writer)
        try:
            self._wait_until_ready(reader)
            self._was_ready = True
        except BaseException:
            self._stop()
            raise
        finally:
            os.close(reader)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _ended_within(self, seconds: float) -> bool:
        assert self._process is not None
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _listens(self) -> bool:
        """Whether its socket still has a listener: a killed process lets go of that before it has ended."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PROBE_S)
            try:
                probe.connect(self.address.removeprefix("unix:"))
            except (ConnectionRefusedError, FileNotFoundError):
                return False
            except OSError:
                pass  # it is busy
        return True

    def _wait_until_ready(self, failure: int) -> None:
        """failure: where it says why, if it fails."""
        assert self._process is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._listens():  # its file exists a moment before that
            code = self._process.poll()
            if code is not None:
                reason = os.read(failure, 4096).decode(errors="replace") or f"it ended with code {code}"
                raise BackendUnavailable(f"envd did not start: {reason}")
            if time.monotonic() > deadline:
                raise BackendUnavailable(f"envd was not ready after {_START_TIMEOUT_S:g} s")
            time.sleep(0.01)

    def _stop(self) -> None:
        if self._process is not None:
            if self._was_ready and not self._listens():
                self._ended_within(_END_S)  # it is ending by itself, and has something to say
            self._process.terminate()
            if not self._ended_within(_END_S):
                self._process.kill()
                self._process.wait()
            self._process, self._was_ready = None, False
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            remove_groups(self._directory.name)
            self._directory = None
