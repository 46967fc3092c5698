"""A private envd server as a child process, for tests, the quickstart and workers that have none to talk to."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from contracts.owned import owned_name, socket_directory
from contracts.processes import end_process
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
_SHORT_LIFE_S = 30.0
_SHORT_LIVES = 3
"""Servers that may die within `_SHORT_LIFE_S` one after another; then no other is started."""
_log = logging.getLogger(__name__)


class LocalEnvd:
    """Starts a server on a unix socket of its own and stops it at the end of the `with` block.

    The server also ends when this process dies, however it dies.
    """

    def __init__(
        self,
        backend: str = "auto",
        *,
        log_level: str = "warning",
        rules: str = "",
        options: Sequence[str] = (),
        revive: bool = False,
    ) -> None:
        """backend: as `--backend` takes it. rules: YAML (docs/sandboxes-rules.md). options: further arguments of `envd
        serve`. revive: start another server at the same address, without the sandboxes, if it dies.
        """
        self._backend, self._rules, self._options = backend, rules, tuple(options)
        self._log_level, self._revive = log_level, revive
        self._directories: list[Path] = []
        """The socket's, and those of servers that may be followed by another."""
        self._process: subprocess.Popen[bytes] | None = None
        self._keeper: threading.Thread | None = None
        self._stopping, self._starting = False, threading.Lock()
        self._was_ready = False

    @property
    def address(self) -> str:
        """Where the server listens, for `SandboxClient`."""
        if not self._directories:
            raise BackendUnavailable("LocalEnvd is not running: use it as `with LocalEnvd() as envd`")
        return f"unix:{self._directories[0]}/{_SOCKET}"

    @property
    def alive(self) -> bool:
        """Whether the server runs, or will: one that died and is not revived does not come back."""
        if self._keeper is None or not self._keeper.is_alive():
            return False
        return self._revive or self._listens()

    def __enter__(self) -> LocalEnvd:
        self._directories = [socket_directory(OWNED, len(_SOCKET))]
        place = self._directories[0].parent
        if shutil.disk_usage(place).free < _ROOM:
            self._stop()
            raise BackendUnavailable(
                f"envd did not start: No space left on device: {place} has less than {_ROOM >> 20} MiB; free some space"
                " there, or point TMPDIR elsewhere"
            )
        ready: Future[None] = Future()
        self._stopping = False
        self._keeper = threading.Thread(target=self._keep, args=(ready,), name="envd", daemon=True)
        self._keeper.start()
        try:
            ready.result()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _keep(self, ready: Future[None]) -> None:
        """Start a server and wait until it exits; with `revive`, start it again each time.

        Runs in a thread that lasts as long as the servers: the kernel ends a child when the thread that started it
        ends.

        ready: gets the result of the first start.
        """
        short_lives = 0
        while short_lives < _SHORT_LIVES:
            began = time.monotonic()
            try:
                process = self._start()
                if process is None:
                    return
                if not ready.done():
                    ready.set_result(None)
                end = f"code {process.wait()}"
            except (BackendUnavailable, OSError, ValueError) as error:
                if not ready.done():
                    ready.set_exception(error)
                    return
                end = str(error)
            if not self._revive or self._stopping:
                return
            short_lives = short_lives + 1 if time.monotonic() - began < _SHORT_LIFE_S else 0
            what = "starting another" if short_lives < _SHORT_LIVES else "the next request starts another"
            _log.warning(
                "the envd server (backend %s) died (%s): %s; the kernel's log may say why", self._backend, end, what
            )

    def _start(self) -> subprocess.Popen[bytes] | None:
        """A server that answers; None if it is to stop. Raises BackendUnavailable."""
        directory = self._directories[0]
        if self._revive:  # a name of its own: processes of a dead server clean up by the old one
            (directory / _SOCKET).unlink(missing_ok=True)
            directory = directory.parent / f"{OWNED}{owned_name()}"
            directory.mkdir(mode=0o700)
            self._directories.append(directory)
        options = ["--listen", self.address, "--state-dir", str(directory), "--backend", self._backend]
        if self._rules:
            rules = directory / "rules.yaml"
            rules.write_text(self._rules, encoding="utf-8")
            options += ["--policy", str(rules)]
        options += [*self._options, "--log-level", self._log_level, "--with-parent", str(os.getpid())]
        root = Path(__file__).resolve().parent.parent
        paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
        reader, writer = os.pipe()
        try:
            with self._starting:
                if self._stopping:
                    return None
                process = self._process = subprocess.Popen(
                    [sys.executable, "-m", "envd", "serve", *options, "--failure-fd", str(writer)],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                    start_new_session=True,
                    pass_fds=[writer],
                )
            os.close(writer)
            writer = -1
            try:
                self._wait_until_ready(process, reader)
            except BackendUnavailable:
                end_process(process, _END_S)
                raise
            self._was_ready = True
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)
        return process

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

    def _wait_until_ready(self, process: subprocess.Popen[bytes], failure: int) -> None:
        """failure: where it says why, if it fails."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._listens():  # its file exists a moment before that
            code = process.poll()
            if code is not None:
                reason = os.read(failure, 4096).decode(errors="replace") or f"it ended with code {code}"
                raise BackendUnavailable(f"envd did not start: {reason}")
            if time.monotonic() > deadline:
                raise BackendUnavailable(f"envd was not ready after {_START_TIMEOUT_S:g} s")
            time.sleep(0.01)

    def _stop(self) -> None:
        with self._starting:
            self._stopping, process = True, self._process
        if process is not None:
            if self._was_ready and not self._listens():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)  # it is ending by itself, and has something to say
            end_process(process, _END_S)
        if self._keeper is not None:
            self._keeper.join()
        self._process, self._keeper, self._was_ready = None, None, False
        while self._directories:
            directory = self._directories.pop()
            shutil.rmtree(directory, ignore_errors=True)
            remove_groups(directory.name)
