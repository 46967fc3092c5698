"""The tool `python`: passes code to the sandbox's interpreter (resident.py), which it starts if there is none."""

from __future__ import annotations

import fcntl
import hashlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress

from envd.tools.connectors.answers import Answer, Arguments, Refused, kept

GRACE_S = 2.0
"""How long interrupted code may take to end before the interpreter is killed."""
DRAINED = 1 << 20
"""Bytes read after the end of the code, at most, of what it printed."""
PID = kept("python")
"""File with the process id of the interpreter; it outlives it, and tells that there was one."""
LOST = "[a new interpreter was started: variables of earlier calls are lost]"


def run(arguments: Arguments) -> Answer:
    """See the schema of `python`."""
    deadline, answer = time.monotonic() + arguments["timeout_s"], Answer()
    address = "triplane-python-" + hashlib.sha256(bytes(PID)).hexdigest()[:16]
    connection = _connected(address)
    if connection is None:
        with kept("python.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            connection = _connected(address)  # another call may have started it meanwhile
            if connection is None:
                if PID.exists():
                    answer.feed(LOST.encode() + b"\n")
                connection = _started(address, arguments["resident"], deadline)
    reading, writing = os.pipe()
    code = arguments["code"].encode("utf-8", "surrogateescape")
    connection.settimeout(max(deadline - time.monotonic(), 0.01))
    try:
        socket.send_fds(connection, [len(code).to_bytes(4, "big")], [writing])
        connection.sendall(code)
    except OSError:
        pass  # what it says, or does not say, is read below
    os.close(writing)
    _follow(connection, reading, answer, deadline, arguments["timeout_s"])
    return answer


def _connected(address: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect("\0" + address)
    except ConnectionRefusedError:
        connection.close()
        return None
    if _peer(connection)[1] != os.getuid():
        raise Refused("the interpreter's socket belongs to another user")
    return connection


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Ids of the process that listens and of its user."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if pid == os.getpid():  # gVisor names the caller
        with suppress(OSError, ValueError):
            pid = int(PID.read_text())
    return pid, uid


def _started(address: str, source: str, deadline: float) -> socket.socket:
    nothing = subprocess.DEVNULL
    command = [sys.executable, "-X", "utf8", "-c", source, address]
    started = subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    PID.write_text(str(started.pid))
    while time.monotonic() < deadline and started.poll() is None:
        connection = _connected(address)
        if connection is not None:
            return connection
        time.sleep(0.005)
    code = started.poll()
    raise Refused("the interpreter has not started in time" if code is None else f"the interpreter ended with {code}")


def _follow(connection: socket.socket, reading: int, answer: Answer, deadline: float, timeout_s: float) -> None:
    """Collect output until the code has ended or its time is over."""
    begun = _collect(connection, reading, answer, deadline)
    said = begun and _collect(connection, reading, answer, deadline)
    late = said is None
    if begun and late:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        said = _collect(connection, reading, answer, time.monotonic() + GRACE_S)
        if said is None and (pid := _peer(connection)[0]) not in (-1, 0, os.getpid()):
            with suppress(OSError):  # it has ended meanwhile
                os.kill(pid, signal.SIGKILL)
    connection.close()  # code that has not begun is not run any more
    words = [f"timed out after {timeout_s:g} s"] if late else []
    if begun is None:
        words += ["the code did not begin: another call's was running"]
    elif not said:
        words += ["the interpreter ended: its variables are lost"]
    answer.status = "late" if late else "ok" if said == b"1" else "failed"
    answer.note = "; ".join(words)


def _collect(connection: socket.socket, reading: int, answer: Answer, deadline: float) -> bytes | None:
    """The next byte that the interpreter says: empty if it died, None at the deadline."""
    watched: list[socket.socket | int] = [connection, reading]
    while (left := deadline - time.monotonic()) > 0:
        ready = select.select(watched, [], [], left)[0]
        if connection in ready:
            try:
                said = connection.recv(1)
            except OSError:
                said = b""
            _drain(reading, answer)
            return said
        if reading in ready:
            data = os.read(reading, 65536)
            answer.feed(data)
            if not data:  # the code has closed its output
                watched = [connection]
    return None


def _drain(reading: int, answer: Answer) -> None:
    """Read what is there, and no more: a child of the code may keep its output open."""
    os.set_blocking(reading, False)
    left = DRAINED
    while left > 0:
        try:
            data = os.read(reading, 65536)
        except BlockingIOError:
            return
        if not data:
            return
        answer.feed(data)
        left -= len(data)
