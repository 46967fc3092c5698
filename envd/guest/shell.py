"""One stateful bash: working directory, variables, functions and background processes live on between calls.

bash reads commands from a private descriptor and reports exit codes on another; both are closed while a command runs.
Every command writes to its own pipe, so what an earlier command left running can't mix into a later answer.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from envd.guest.loop import Loop, Timer
from envd.sandbox.proctree import children_below, kill_since

_CONTROL, _STATUS = 200, 201
_READ = " && ".join(f"builtin read -r -d '' -u 200 __envd_{name}" for name in ("mode", "out", "id", "command"))
_REPORT = r"""builtin printf '%s %d\n' "$__envd_id" "$?" >&201"""
_TOGETHER = (
    '{ ( exec 200<&-; builtin eval "$__envd_command" 201>&- ) </dev/null >"$__envd_out" 2>&1; ' + _REPORT + "; } &"
)
_ALONE = 'builtin eval "$__envd_command" 200<&- 201>&- </dev/null >"$__envd_out" 2>&1; ' + _REPORT
# On one line, so that bash counts an error's line from the command's own first line.
_DRIVER = f"while {_READ}; do if [[ $__envd_mode == together ]]; then {_TOGETHER} else {_ALONE}; fi; done"
_RESET_SIGNALS = [signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP]
_MAX_STATUS = 1 << 16


@dataclass
class Ended:
    """How one command ended."""

    code: int
    timed_out: bool
    died: bool
    true_bytes: int
    head: bytes
    tail: bytes


@dataclass
class _Kept:
    """Head and tail of a command's output, in constant memory."""

    limit: int
    head: bytearray = field(default_factory=bytearray)
    tail: bytearray = field(default_factory=bytearray)
    true_bytes: int = 0

    def feed(self, data: bytes) -> None:
        half = self.limit // 2
        self.true_bytes += len(data)
        room = max(0, half - len(self.head))
        self.head += data[:room]
        self.tail += data[room:]
        if len(self.tail) > 4 * half:
            del self.tail[:-half]

    def parts(self) -> tuple[bytes, bytes]:
        half = self.limit // 2
        if self.true_bytes <= 2 * half:
            return bytes(self.head + self.tail), b""
        return bytes(self.head), bytes(self.tail[-half:])


@dataclass
class _Running:
    """One command that was handed to bash."""

    identity: str
    pipe: int
    kept: _Kept
    deadline: float
    code: int | None = None


@dataclass
class Job:
    """Commands that are answered together."""

    commands: list[tuple[bytes, float]]
    limit: int
    answer: Callable[[list[Ended] | OSError], None]
    running: list[_Running] = field(default_factory=list)
    before: frozenset[int] = frozenset()


class Shell:
    """The sandbox's shell. Starts on first use; restarted after it died or a command ran out of time.

    kept: pids that no timeout may kill, whatever started meanwhile. reap: collects children and tells `ended` of the shell's own end.
    """

    def __init__(
        self,
        loop: Loop,
        workspace: Path,
        scratch: Path,
        env: Mapping[str, str],
        kept: Callable[[], Iterable[int]],
        reap: Callable[[], object],
    ) -> None:
        self._loop, self._workspace, self._scratch = loop, workspace, scratch
        self._env, self._kept, self._reap = env, kept, reap
        self._queue: deque[Job] = deque()
        self._job: Job | None = None
        self._timer: Timer | None = None
        self._pid: int | None = None
        self._code: int | None = None
        self._death: int | None = None
        """How it died while nothing ran in it: the next job is told, since state it may count on is lost."""
        self._control = self._status = self._alive = -1
        self._unsent = b""
        self._said = b""
        self._count = 0

    def submit(self, job: Job) -> None:
        """Run a job when those before it are done.

        One command runs in the shell itself. Several run at the same time, each in a subshell: they see the shell's state
        and change it for nobody; when one of them runs out of time, all that are unfinished end.
        """
        self._queue.append(job)
        self._next()

    def cancel(self, job: Job) -> None:
        """End a job as its deadline would; it answers nothing."""
        if job in self._queue:
            self._queue.remove(job)
        elif job is self._job:
            self._stop(job)
            self._finish(job)
            self._next()

    def ended(self, pid: int, code: int) -> bool:
        """Take note of a child's end; False where it is not the shell."""
        if pid != self._pid:
            return False
        self._code = code
        return True

    def _next(self) -> None:
        while self._job is None and self._queue:
            job = self._queue.popleft()
            try:
                self._begin(job)
            except OSError as error:
                self._stop(job)  # else those that run already would go on, with nobody to read them
                self._finish(job)
                job.answer(error)

    def _begin(self, job: Job) -> None:
        if job.commands and self._death is not None:
            code, self._death = self._death, None
            job.answer([Ended(code, False, True, 0, b"", b"") for _ in job.commands])
            return
        self._job = job
        self._start()
        if not job.commands:  # whoever asks wants the shell to run before its first command
            self._job = None
            job.answer([])
            return
        job.before = frozenset(children_below(os.getpid())) - {self._pid or 0}
        now = time.monotonic()
        data = b""
        for command, limit_s in job.commands:
            self._count += 1
            path = self._scratch / f"out-{self._count}"
            mode = b"together" if len(job.commands) > 1 else b"alone"
            data += b"".join(part + b"\0" for part in (mode, os.fsencode(path), str(self._count).encode(), command))
            os.mkfifo(path, 0o600)
            pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            each = _Running(str(self._count), pipe, _Kept(job.limit), now + limit_s)
            job.running.append(each)
            self._loop.watch(pipe, lambda each=each: self._pump(each))  # type: ignore[misc]
        self._unsent = data
        self._send()
        self._time(job)

    def _start(self) -> None:
        if self._pid is not None:
            return
        control_read, control = _pair()
        status, status_write = _pair()
        for fd in (status, control):
            os.set_blocking(fd, False)
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        actions: list[tuple[int, ...]] = [(os.POSIX_SPAWN_DUP2, null, number) for number in (0, 1, 2)]
        actions += [(os.POSIX_SPAWN_DUP2, control_read, _CONTROL), (os.POSIX_SPAWN_DUP2, status_write, _STATUS)]
        command = ["bash", "--norc", "--noprofile", "-c", f"cd {str(self._workspace)!r}; {_DRIVER}"]
        try:
            self._pid = os.posix_spawnp(
                "bash", command, dict(self._env), file_actions=actions, setsid=True, setsigdef=_RESET_SIGNALS
            )
            self._alive = os.pidfd_open(self._pid)
        except OSError:
            os.close(control)
            os.close(status)
            raise
        finally:
            for fd in (control_read, status_write, null):
                os.close(fd)
        self._control, self._status, self._code, self._said = control, status, None, b""
        self._loop.watch(status, self._heard)
        self._loop.watch(self._alive, self._died)

    def _send(self) -> None:
        """Hand bash what it has not taken yet: a command may be longer than a pipe holds."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._control, self._unsent) :]
        except BlockingIOError:
            self._loop.watch(self._control, self._send, 2)
            return
        except BrokenPipeError:
            self._unsent = b""  # the shell has died; its pidfd says so
        self._loop.unwatch(self._control)

    def _time(self, job: Job) -> None:
        if self._timer is not None:
            self._timer.cancel()
        nearest = min(each.deadline for each in job.running if each.code is None)
        self._timer = self._loop.after(nearest - time.monotonic(), self._late)

    def _late(self) -> None:
        if self._job is not None:
            self._complete(self._job, timed_out=True)

    def _heard(self) -> None:
        """bash reported exit codes."""
        job = self._job
        if not self._note() or job is None:
            return
        if all(each.code is not None for each in job.running):
            self._complete(job)
        else:
            self._time(job)

    def _note(self) -> bool:
        """Take exit codes down; False where there was none."""
        *lines, self._said = (self._said + (_read(self._status) or b"")).split(b"\n")
        self._said = self._said[-_MAX_STATUS:]
        codes = dict(line.split(b" ", 1) for line in lines if b" " in line)
        for each in self._job.running if self._job is not None else ():
            code = codes.get(each.identity.encode())
            if each.code is None and code is not None and code.isdigit():
                each.code = int(code[:9])
        return bool(lines)

    def _died(self) -> None:
        self._note()
        job = self._job
        if job is not None and any(each.code is None for each in job.running):
            self._complete(job, died=True)
            return
        self._reap()
        self._death = self._last_code()
        self._let_go()
        if job is not None:
            self._complete(job)

    def _complete(self, job: Job, *, timed_out: bool = False, died: bool = False) -> None:
        code = self._stop(job) if timed_out or died else 0
        results = []
        for each in job.running:
            self._collect(each)
            head, tail = each.kept.parts()
            if each.code is not None:
                results.append(Ended(each.code, False, False, each.kept.true_bytes, head, tail))
            else:
                last = 0 if timed_out else code
                results.append(Ended(last, timed_out, not timed_out, each.kept.true_bytes, head, tail))
        self._finish(job)
        job.answer(results)
        self._next()

    def _finish(self, job: Job) -> None:
        """What the commands left running may still write to their pipes: drain these, so that nothing blocks on a full one."""
        if self._timer is not None:
            self._timer.cancel()
        for each in job.running:
            self._unlink(each)
            self._loop.unwatch(each.pipe)
            self._loop.watch(each.pipe, lambda pipe=each.pipe: self._drain(pipe))  # type: ignore[misc]
            self._drain(each.pipe)
        self._job = None

    def _pump(self, each: _Running) -> None:
        data = _read(each.pipe)
        if data:
            each.kept.feed(data)
        elif data == b"":
            self._loop.unwatch(each.pipe)  # no writer is left

    def _collect(self, each: _Running) -> None:
        """Take what a finished command left in its pipe: at most one pipe's capacity, so a flood can't hold us here."""
        for _ in range(16):
            data = _read(each.pipe)
            if not data:
                break
            each.kept.feed(data)

    def _unlink(self, each: _Running) -> None:
        try:
            (self._scratch / f"out-{each.identity}").unlink(missing_ok=True)
        except OSError:
            pass  # a command put something else there

    def _drain(self, pipe: int) -> None:
        for _ in range(16):
            data = _read(pipe)
            if data is None:
                return
            if not data:
                self._loop.unwatch(pipe)
                os.close(pipe)
                return

    def _stop(self, job: Job) -> int:
        """End the shell and what the commands started; background processes of earlier calls live on."""
        self._reap()
        kill_since(os.getpid(), job.before | frozenset(self._kept()), self._reap)
        self._reap()
        code = self._last_code()
        self._let_go()
        return code

    def _last_code(self) -> int:
        """How the shell ended, as a shell counts it."""
        code = -signal.SIGKILL if self._code is None else self._code
        return code if code >= 0 else 128 - code

    def _let_go(self) -> None:
        if self._pid is None:
            return
        for fd in (self._control, self._status, self._alive):
            self._loop.unwatch(fd)
            os.close(fd)
        self._pid, self._unsent = None, b""


def _pair() -> tuple[int, int]:
    """Two connected descriptors that nobody can open a second time through /proc/PID/fd, as a pipe's can be."""
    one, other = socket.socketpair()
    return one.detach(), other.detach()


def _read(fd: int) -> bytes | None:
    """Read what is there: None for nothing yet, empty for end of file."""
    try:
        return os.read(fd, 65536)
    except BlockingIOError:
        return None
