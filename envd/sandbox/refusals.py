"""Answers sandboxes' refused system calls and tells the server of them, in a process of its own: code that makes a million of them waits for each,
and takes no time from the zygote. envd/native/spawn_watch.c is the same for the native spawner.

    process 1 of a sandbox --listener and name--> watcher --{"id", "refused", "count"}--> the zygote's control connection

It ends with the zygote.
"""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import time
from dataclasses import dataclass
from typing import NoReturn

from envd.sandbox import linux, wire
from envd.sandbox.syscalls import refusal_of

_REPORTS = 4
"""Of one sandbox in a second."""
_POLITE = 10
"""How nice it is."""
_ASKED = struct.Struct("=QIIiIQ6Q")
"""struct seccomp_notif: id, pid, flags; number, architecture, instruction pointer, arguments of the call."""
_ANSWERED = struct.Struct("=QqiI")
"""struct seccomp_notif_resp: id, value, error, flags."""
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
"""SECCOMP_IOCTL_NOTIF_RECV and SECCOMP_IOCTL_NOTIF_SEND."""
_CONTINUE = 1
"""The kernel refuses it itself: whatever changes meanwhile, nothing is granted here."""
_MAX_NAME = 256


@dataclass
class _Watched:
    """One sandbox."""

    name: str
    second: int = 0
    said: int = 0
    """Reports in that second."""
    calls: int = 0
    """Since the last report."""


class Watcher:
    """The process that answers, as the zygote sees it."""

    def __init__(self, control: socket.socket) -> None:
        """Start it; it tells by `control`. Raises OSError."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._socket.close()
            _run(parent, control, theirs)
        theirs.close()

    def add(self, name: str, listener: int) -> None:
        """In a sandbox's process 1: hand its listener over. Where the watcher has gone, refused calls fail in another way."""
        try:
            socket.send_fds(self._socket, [name.encode()], [listener])
        except OSError:
            pass
        os.close(listener)

    def stop(self) -> None:
        """End it: what is refused from now on fails in another way."""
        self._socket.close()
        os.kill(self._pid, signal.SIGKILL)


def _run(parent: int, control: socket.socket, sandboxes: socket.socket) -> NoReturn:
    linux.die_with_parent()
    try:
        if os.getppid() == parent:
            os.nice(_POLITE)
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            _answer_all(control, sandboxes)
    finally:
        linux.leave(0)


def _answer_all(control: socket.socket, sandboxes: socket.socket) -> None:
    known: dict[int, _Watched] = {}
    poll = select.epoll()
    poll.register(sandboxes, select.EPOLLIN)
    while True:
        for fd, events in poll.poll():
            if fd == sandboxes.fileno():
                data, listeners = wire.receive_fds(sandboxes, _MAX_NAME, 1)
                if not data:
                    return  # the zygote has ended
                for listener in listeners:
                    known[listener] = _Watched(data.decode())
                    poll.register(listener, select.EPOLLIN)
            elif events & select.EPOLLIN:
                _answer(fd, known[fd], control)
            else:  # all that could make calls have ended
                del known[fd]
                os.close(fd)


def _answer(listener: int, watched: _Watched, control: socket.socket) -> None:
    asked = bytearray(_ASKED.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, asked)
    except OSError:
        return  # its thread was killed meanwhile
    identity, _, _, number, architecture, _, *arguments = _ASKED.unpack(asked)
    call, error = refusal_of(architecture, number, arguments)
    _tell(watched, call, control)  # first: whoever sees what the call led to finds the event there
    try:
        fcntl.ioctl(listener, _SEND, _ANSWERED.pack(identity, 0, -error, 0 if error else _CONTINUE))
    except OSError:
        pass  # killed now


def _tell(watched: _Watched, call: str, control: socket.socket) -> None:
    now = int(time.monotonic())
    watched.calls += 1
    if now != watched.second:
        watched.second, watched.said = now, 0
    watched.said += 1
    if watched.said > _REPORTS:
        return
    report = {"id": watched.name, "refused": call, "count": watched.calls}
    try:
        control.send(json.dumps(report).encode(), socket.MSG_DONTWAIT)
        watched.calls = 0
    except OSError:
        pass  # the server is behind: it is told with the next
