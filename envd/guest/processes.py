"""Processes that a client starts and follows: bounded rings of output, terminals, signals."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from envd.guest.loop import Loop, Timer
from envd.guest.protocol import CHUNK, Writer
from envd.sandbox.proctree import descendants

PTY, STDIN, MIXED = 1, 2, 4
_KEPT_ENDED = 64
_MIN_RING, _MAX_RING = 4096, 16 * 1024 * 1024
_MAX_ARGV = 64 * 1024
"""Bytes of argv that a state shows."""
_READ = 65536


class Ring:
    """The last bytes of a stream, by their offsets."""

    def __init__(self, size: int) -> None:
        self._size = max(_MIN_RING, min(size, _MAX_RING))
        self._data = bytearray()
        self.total = 0
        self.closed = False

    def feed(self, data: bytes) -> None:
        """Append; drop the oldest."""
        self.total += len(data)
        self._data += data
        if len(self._data) > 2 * self._size:
            del self._data[: -self._size]

    def at(self, offset: int, at_most: int) -> tuple[int, bytes]:
        """(where it starts, what is kept from there on)."""
        kept = min(len(self._data), self._size)
        start = max(offset, self.total - kept)
        first = len(self._data) - (self.total - start)
        return start, bytes(self._data[first : first + at_most]) if start < self.total else b""


@dataclass
class Process:
    """One that was started."""

    number: int
    pid: int
    argv: list[bytes]
    rings: dict[int, Ring]
    stdin: int | None = None
    terminal: int | None = None
    running: bool = True
    code: int = 0
    timed_out: bool = False
    ended: int = 0
    """Which end of the sandbox's it was, from 1."""
    timer: Timer | None = None
    wakes: list[Callable[[], None]] = field(default_factory=list)
    """Called when output came or it ended."""

    def write_state(self, fields: Writer) -> None:
        """Append the protocol's state."""
        fields.u32(self.number).u32(self.pid).u8(self.running).i32(self.code).u8(self.timed_out)
        fields.u64(self.rings[1].total).u64(self.rings[2].total)
        shown, size = [], 0
        for each in self.argv:
            size += len(each) + 4
            if size > _MAX_ARGV:
                break
            shown.append(each)
        fields.items(shown)

    def wake(self) -> None:
        """Have those that wait look again."""
        for call in list(self.wakes):
            call()


class Processes:
    """All that were started here. Ended ones are known until there are many."""

    def __init__(self, loop: Loop, workspace: Path) -> None:
        self._loop, self._workspace = loop, workspace
        self._known: dict[int, Process] = {}
        self._count = 0
        self._ends = 0

    def pids(self) -> list[int]:
        """Of those that run."""
        return [each.pid for each in self._known.values() if each.running]

    def all(self) -> Iterable[Process]:
        """In the order of their start."""
        return self._known.values()

    def find(self, number: int) -> Process:
        """By its number. Raises OSError ESRCH."""
        if number not in self._known:
            raise OSError(errno.ESRCH, "no such process")
        return self._known[number]

    def start(
        self,
        argv: list[bytes],
        env: Mapping[str, str],
        directory: str,
        flags: int,
        size: tuple[int, int],
        timeout_ms: int,
        ring: int,
    ) -> Process:
        """Start one. Raises OSError as execve and chdir do."""
        if not argv:
            raise OSError(errno.EINVAL, "no program is named")
        ours: dict[int, int] = {}
        theirs: list[int] = []
        try:
            slots = self._streams(flags, size, ours, theirs)
            pid = _spawn(argv, env, self._workspace / directory if directory else self._workspace, slots, flags)
        except BaseException:
            for fd in set(ours.values()):
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        self._count += 1
        process = Process(self._count, pid, argv, {1: Ring(ring), 2: Ring(ring)})
        self._follow(process, flags, ours)
        if timeout_ms:
            process.timer = self._loop.after(timeout_ms / 1000, lambda: self._late(process))
        self._known[process.number] = process
        self._forget()
        return process

    def ended(self, pid: int, code: int) -> bool:
        """Take note of a child's end; False where it is none of these."""
        for each in self._known.values():
            if each.pid == pid and each.running:
                self._ends += 1
                each.running, each.code, each.ended = False, code, self._ends
                if each.timer is not None:
                    each.timer.cancel()
                each.wake()
                return True
        return False

    def write(self, process: Process, data: bytes) -> int:
        """Write to standard input; 0 while it is full."""
        if process.stdin is None:
            raise OSError(errno.EPIPE, "standard input is closed")
        try:
            return os.write(process.stdin, data) if data else 0
        except BlockingIOError:
            return 0

    def close_stdin(self, process: Process) -> None:
        """End standard input; on a terminal by its end-of-file character."""
        if process.stdin is None:
            return
        if process.terminal is not None:
            self.write(process, b"\x04")
        else:
            os.close(process.stdin)
        process.stdin = None

    def signal(self, process: Process, number: int, tree: bool) -> None:
        """Signal it, or with `tree` all below it and its session too."""
        if not process.running:
            raise OSError(errno.ESRCH, "no such process")
        for pid in _tree(process.pid) if tree else [process.pid]:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def resize(self, process: Process, rows: int, columns: int) -> None:
        """Tell its terminal its size. Raises OSError ENOTTY."""
        if process.terminal is None:
            raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))
        _resize(process.terminal, rows, columns)

    def _streams(self, flags: int, size: tuple[int, int], ours: dict[int, int], theirs: list[int]) -> list[int]:
        """Make the streams: the child's 0, 1 and 2."""
        if flags & PTY:
            master, slave = pty.openpty()
            ours[1] = master
            theirs.append(slave)
            _resize(slave, *size)
            return [slave] * 3
        slots = []
        if flags & STDIN:
            end, ours[0] = os.pipe2(os.O_CLOEXEC)
        else:
            end = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        theirs.append(end)
        slots.append(end)
        for channel in (1,) if flags & MIXED else (1, 2):
            ours[channel], end = os.pipe2(os.O_CLOEXEC)
            theirs.append(end)
            slots.append(end)
        return slots if len(slots) == 3 else [*slots, slots[1]]

    def _follow(self, process: Process, flags: int, ours: dict[int, int]) -> None:
        for fd in ours.values():
            os.set_blocking(fd, False)
        if flags & PTY:
            process.terminal = ours[1]
        if flags & STDIN:
            process.stdin = ours[1] if flags & PTY else ours[0]
        for channel in (1, 2):
            if channel not in ours:
                process.rings[channel].closed = True
            else:
                fd = ours[channel]
                self._loop.watch(fd, lambda fd=fd, channel=channel: self._pump(process, channel, fd))  # type: ignore[misc]

    def _pump(self, process: Process, channel: int, fd: int) -> None:
        ring = process.rings[channel]
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return
        except OSError:  # EIO: the last process has let go of the terminal
            data = b""
        if data:
            ring.feed(data)
        else:
            ring.closed = True
            self._loop.unwatch(fd)
            os.close(fd)
            if fd == process.terminal:
                process.terminal = process.stdin = None
        process.wake()

    def _late(self, process: Process) -> None:
        process.timed_out = True
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in _tree(process.pid):
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue

    def _forget(self) -> None:
        """What ended first, so that who waits for an end has time to hear of it, however old the process is."""
        over = [
            each for each in self._known.values() if not each.running and all(r.closed for r in each.rings.values())
        ]
        over.sort(key=lambda each: each.ended)
        for each in over[: max(0, len(over) - _KEPT_ENDED)]:
            if each.stdin is not None:
                os.close(each.stdin)
            del self._known[each.number]


def write_output(process: Process, channel: int, offset: int, at_most: int, *, even_nothing: bool) -> bytes | None:
    """OUTPUT's fields; None while there is nothing to tell, unless `even_nothing`."""
    ring = process.rings.get(channel)
    if ring is None:
        raise OSError(errno.EINVAL, "a process has the channels 1 and 2")
    start, data = ring.at(min(offset, ring.total), min(at_most, CHUNK))
    ended = ring.closed and start + len(data) == ring.total
    if not data and not ended and not even_nothing:
        return None
    return Writer().u64(start).u64(ring.total).u8(ended).data(data).body()


def _spawn(argv: list[bytes], env: Mapping[str, str], directory: Path, slots: list[int], flags: int) -> int:
    started = subprocess.Popen(
        argv,
        env=env,
        cwd=directory,
        stdin=slots[0],
        stdout=slots[1],
        stderr=slots[2],
        start_new_session=True,
        preexec_fn=_take_terminal if flags & PTY else None,
    )
    started.returncode = 0  # the agent collects its children itself
    return started.pid


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _resize(fd: int, rows: int, columns: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", min(rows, 65535), min(columns, 65535), 0, 0))


def _tree(pid: int) -> list[int]:
    """A process, all below it, and what else is in its session (what daemonized without a session of its own)."""
    found = {pid, *descendants(pid)}
    for each in descendants(os.getpid()):
        try:
            if os.getsid(each) == pid:
                found.add(each)
        except ProcessLookupError:
            continue
    return sorted(found)
