"""Run a server and remove all of its processes at the end.

    python server_guard.py PARENT SCRATCH GRACE_S -- COMMAND...

Standard library only, Linux.

The guard ends when the server ends, on SIGTERM, or when its parent has ended, which closes stdin. It then kills all
descendants of the server (it adopts orphans instead of init) and removes SCRATCH. If the guard itself is killed, the
kernel kills the server, the server's workers watch $TRIPLANE_SERVER_GUARD themselves, and the parent's stop or the next
server's start removes SCRATCH.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.2
_TRACKER_S = 3.0
"""Seconds for Python's resource trackers to remove shared memory after all other processes have ended."""
_TRACKER = b"multiprocessing.resource_tracker"


def main(arguments: list[str]) -> int:
    """Guard the server until it ends. Returns its exit code."""
    parent, scratch, grace_s = int(arguments[0]), Path(arguments[1]), float(arguments[2])
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        asked = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ask)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard = os.getpid()

    def end_with_guard() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:  # it was killed before the request
            os.kill(os.getpid(), signal.SIGKILL)

    # code between fork and exec is safe, since this process has one thread
    server = subprocess.Popen(
        arguments[4:],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "TRIPLANE_SERVER_GUARD": str(guard)},
        preexec_fn=end_with_guard,
    )
    try:
        while not asked and server.poll() is None and os.getppid() == parent and not _is_closed(sys.stdin.fileno()):
            time.sleep(_POLL_S)
        if server.poll() is None:
            server.terminate()
            _wait(server, grace_s)
    finally:
        _end_descendants()
        shutil.rmtree(scratch, ignore_errors=True)
    return server.returncode or 0


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value))


def _is_closed(pipe: int) -> bool:
    """Whether the other end of the pipe is closed."""
    readable, _, _ = select.select([pipe], [], [], 0)
    return bool(readable) and os.read(pipe, 1) == b""


def _wait(server: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        server.wait(seconds)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _end_descendants() -> None:
    """Kill all descendants, resource trackers last."""
    patience = time.monotonic() + _TRACKER_S
    while True:
        _reap()
        alive = list(_descendants(os.getpid()))
        if not alive:
            return
        spare = time.monotonic() < patience and all(_is_tracker(pid) for pid in alive)
        for pid in alive:
            if not spare and (not _is_tracker(pid) or time.monotonic() >= patience):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        time.sleep(0.05)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue
    except ChildProcessError:
        return


def _descendants(root: int) -> Iterator[int]:
    """All descendants of `root`, except zombies."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry.name))
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        yield from below
        waiting += below


def _is_tracker(pid: int) -> bool:
    try:
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
