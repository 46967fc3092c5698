"""The tool `python`: passes code to the sandbox's interpreter (resident.py), which it starts if there is none."""

from __future__ import annotations

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
"""File with the process id of the interpreter; it outlives it."""
LOST = "[a new interpreter was started: variables of earlier calls are lost]"


def run(arguments: Arguments) -> Answer:
    """See the schema of `python`."""
    deadline, answer = time.monotonic() + arguments["timeout_s"], Answer()
    address = "triplane-python-" + hashlib.sha256(bytes(PID)).hexdigest()[:16]
    connection = _connected(address)
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
    if struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1] != os.getuid():
        raise Refused("the interpreter's socket belongs to another user")
    return connection


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
    said, late = _collect(connection, reading, answer, deadline), False
    if said is None:
        late = True
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        said = _collect(connection, reading, answer, time.monotonic() + GRACE_S)
    if said is None:
        with suppress(OSError, ValueError):  # it has ended meanwhile, or somebody changed the file
            os.kill(int(PID.read_text()), signal.SIGKILL)
    words = [f"timed out after {timeout_s:g} s"] if late else []
    if not said:
        words += ["the interpreter ended: its variables are lost"]
    answer.status = "late" if late else "ok" if said == b"1" else "failed"
    answer.note = "; ".join(words)


def _collect(connection: socket.socket, reading: int, answer: Answer, deadline: float) -> bytes | None:
    """What the interpreter says at the end of the code: empty if it died, None at the deadline."""
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
