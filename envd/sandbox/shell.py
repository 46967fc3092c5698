"""One stateful bash: working directory, variables, functions and background processes live on between calls.

bash reads commands from a private descriptor and reports exit codes on another; both are closed while a command runs.
Every command writes to its own pipe, so what an earlier command left running can't mix into a later answer.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from envd.sandbox.proctree import descendants, kill_since, reap
from envd.tools.output import Output
from envd.types import ToolResult

_CONTROL, _STATUS = 200, 201
_READ = " && ".join(f"builtin read -r -d '' -u 200 __envd_{name}" for name in ("mode", "out", "id", "command"))
_REPORT = r"""builtin printf '%s %d\n' "$__envd_id" "$?" >&201"""
_TOGETHER = (
    '{ ( exec 200<&-; builtin eval "$__envd_command" 201>&- ) </dev/null >"$__envd_out" 2>&1; ' + _REPORT + "; } &"
)
_ALONE = 'builtin eval "$__envd_command" 200<&- 201>&- </dev/null >"$__envd_out" 2>&1; ' + _REPORT
# On one line, so that bash counts an error's line from the command's own first line.
_DRIVER = f"while {_READ}; do if [[ $__envd_mode == together ]]; then {_TOGETHER} else {_ALONE}; fi; done"
_RESET_SIGNALS = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGALRM, signal.SIGCHLD, signal.SIGTERM]


class ServerGone(Exception):
    """The server closed the connection while a command ran: nobody waits for its result."""


@dataclass
class _Running:
    """One command that was handed to bash."""

    identity: str
    pipe: int
    deadline_s: float
    """How long it may run."""
    output: Output = field(default_factory=Output)
    code: int | None = None


class Shell:
    """The sandbox's shell. Starts on first use; restarted after it died or a command ran out of time."""

    def __init__(self, workspace: Path, scratch: Path, env: Mapping[str, str], server: int) -> None:
        self._workspace, self._scratch, self._env, self._server = workspace, scratch, dict(env), server
        self._pid: int | None = None
        self._control = self._status = self._alive = -1
        self._count = 0
        self._background: list[int] = []  # pipes that background processes may still write to

    def run(self, commands: list[tuple[str, float]]) -> list[ToolResult]:
        """Run (command, deadline in seconds) pairs and answer in order.

        One command runs in the shell itself. Several run at the same time, each in a subshell: they see the shell's state
        and change it for nobody; when one of them runs out of time, all that are unfinished end.
        """
        self._drain_background()
        self._start()
        before = frozenset(descendants(os.getpid())) - {self._pid or 0}
        running: list[_Running] = []
        try:
            for command, limit in commands:
                running.append(self._submit(command, limit, together=len(commands) > 1))
        except BaseException:
            self._stop(before)  # else those that run already would go on, with nobody to read them
            self._background += [each.pipe for each in running]
            raise
        started = time.monotonic()
        died, timed_out = self._wait(running, started)
        seconds = time.monotonic() - started
        code = 0
        if died or timed_out:
            code = self._stop(before)
        for each in running:
            self._collect(each)
            self._background.append(each.pipe)
        results = [self._result(each, code, timed_out, seconds) for each in running]
        self._drain_background()
        return results

    def _start(self) -> None:
        if self._pid is not None:
            return
        control_read, control = os.pipe2(os.O_CLOEXEC)
        status, status_write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(status, False)
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        actions: list[tuple[int, ...]] = [(os.POSIX_SPAWN_DUP2, null, number) for number in (0, 1, 2)]
        actions += [(os.POSIX_SPAWN_DUP2, control_read, _CONTROL), (os.POSIX_SPAWN_DUP2, status_write, _STATUS)]
        command = ["bash", "--norc", "--noprofile", "-c", f"cd {str(self._workspace)!r}; {_DRIVER}"]
        try:
            self._pid = os.posix_spawnp(
                "bash", command, self._env, file_actions=actions, setsid=True, setsigdef=_RESET_SIGNALS
            )
        except OSError:
            os.close(control)
            os.close(status)
            raise
        finally:
            for fd in (control_read, status_write, null):
                os.close(fd)
        self._control, self._status, self._alive = control, status, os.pidfd_open(self._pid)

    def _submit(self, command: str, limit: float, *, together: bool) -> _Running:
        self._count += 1
        path = self._scratch / f"out-{self._count}"
        parts = ("together" if together else "alone", str(path), str(self._count), command)
        data = b"".join(os.fsencode(part) + b"\0" for part in parts)
        os.mkfifo(path, 0o600)
        pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while data:
                data = data[os.write(self._control, data) :]
        except BrokenPipeError:
            pass  # the shell has died; waiting for its status finds that out
        return _Running(str(self._count), pipe, limit)

    def _wait(self, running: list[_Running], started: float) -> tuple[bool, bool]:
        """Pump output until all have reported, the shell died or a deadline passed: (died, timed out)."""
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        poll.register(self._alive, select.POLLIN)
        poll.register(self._server, select.POLLRDHUP)
        for each in running:
            poll.register(each.pipe, select.POLLIN)
        by_pipe = {each.pipe: each for each in running}
        pending = b""
        while True:
            unfinished = [each for each in running if each.code is None]
            if not unfinished:
                return False, False
            left = min(each.deadline_s for each in unfinished) - (time.monotonic() - started)
            if left <= 0:
                return False, True
            for fd, _ in poll.poll(left * 1000 + 1):
                if fd == self._server:
                    raise ServerGone
                if fd in (self._status, self._alive):
                    *lines, pending = (pending + (_read(self._status) or b"")).split(b"\n")
                    _note(running, lines)
                    if fd == self._alive and any(each.code is None for each in running):
                        return True, False
                elif not self._pump(by_pipe[fd]):
                    poll.unregister(fd)

    def _pump(self, each: _Running) -> bool:
        """Read once from a command's pipe; False when no writer is left."""
        data = _read(each.pipe)
        if data:
            each.output.feed(data)
        return data != b""

    def _collect(self, each: _Running) -> None:
        """Take what a finished command left in its pipe: at most one pipe's capacity, so a flood can't hold us here."""
        for _ in range(16):
            data = _read(each.pipe)
            if not data:
                break
            each.output.feed(data)
        (self._scratch / f"out-{each.identity}").unlink(missing_ok=True)

    def _stop(self, before: frozenset[int]) -> int:
        """End the shell and what the commands started; background processes of earlier calls live on."""
        ended = reap()
        kill_since(os.getpid(), before)
        ended.update(reap())
        for fd in (self._control, self._status, self._alive):
            os.close(fd)
        pid, self._pid = self._pid or 0, None
        return ended.get(pid, -signal.SIGKILL)

    def _result(self, each: _Running, shell_code: int, timed_out: bool, seconds: float) -> ToolResult:
        if each.code is not None:
            last = f"exit {each.code}"
        elif timed_out:
            last = f"timed out after {each.deadline_s:g} s; shell restarted"
        else:
            last = f"exit {shell_code if shell_code >= 0 else 128 - shell_code}; shell restarted"
        text = each.output.text()
        if text and not text.endswith("\n"):
            text += "\n"
        return ToolResult(
            ok=each.code == 0,
            text=text + last,
            true_bytes=each.output.true_bytes,
            truncated=each.output.truncated,
            timed_out=each.code is None and timed_out,
            seconds=seconds,
        )

    def background_pipes(self) -> list[int]:
        """Pipes that background processes may still write to; the owner drains them while it is idle."""
        return self._background

    def _drain_background(self) -> None:
        for pipe in list(self._background):
            self.drain(pipe)

    def drain(self, pipe: int) -> None:
        """Throw away what background processes wrote, so that they never block on a full pipe."""
        for _ in range(16):
            data = _read(pipe)
            if data is None:
                return
            if not data:
                os.close(pipe)
                self._background.remove(pipe)
                return


def _note(running: list[_Running], lines: list[bytes]) -> None:
    codes = dict(line.split(b" ", 1) for line in lines if b" " in line)
    for each in running:
        code = codes.get(each.identity.encode())
        if each.code is None and code is not None and code.isdigit():
            each.code = int(code)


def _read(fd: int) -> bytes | None:
    """Read what is there: None for nothing yet, empty for end of file."""
    try:
        return os.read(fd, 65536)
    except BlockingIOError:
        return None
