"""Serves one sandbox from inside it: tool calls in, results out, until the server closes the connection.

It is process 1 of its sandbox in the namespaces backend, so its end is the end of everything in there.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from envd.sandbox import wire
from envd.sandbox.diff import workspace_diff
from envd.sandbox.proctree import reap
from envd.sandbox.shell import ServerGone, Shell
from envd.tools import check_arguments, run_file_tool
from envd.types import ToolCall, ToolResult

Reply = tuple[dict[str, Any], bytes]
_REAP_MS = 1000


@dataclass(frozen=True)
class Place:
    """Where an agent finds its things."""

    workspace: Path
    template: Path
    scratch: Path
    """A directory outside the workspace for the shell's pipes."""


class _Deadline(Exception):
    pass


class Agent:
    """One sandbox's tools and shell."""

    def __init__(self, sock: socket.socket, place: Place) -> None:
        self._sock = sock
        self._place = place
        self._shell: Shell | None = None
        self._env: dict[str, str] = {}
        self._operations: dict[str, Callable[[dict[str, Any], bytes], Reply]] = {
            "init": self._init,
            "batch": self._batch,
            "diff": self._diff,
        }

    def serve(self) -> None:
        """Answer requests until the server goes away."""
        signal.signal(signal.SIGALRM, _on_alarm)
        while self._wait():
            frame = wire.receive(self._sock)
            if frame is None:
                return
            header, blob = frame
            try:
                reply = self._operations[header["op"]](header, blob)
            except ServerGone:
                return
            wire.send(self._sock, *reply)

    def _wait(self) -> bool:
        """Wait for the next request; meanwhile collect dead children and drain background output."""
        if self._shell is None:
            return True
        while True:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            pipes = self._shell.background_pipes()
            for pipe in pipes:
                poll.register(pipe, select.POLLIN)
            for fd, _ in poll.poll(_REAP_MS):
                if fd == self._sock.fileno():
                    return True
                self._shell.drain(fd)
            reap()

    def _init(self, header: dict[str, Any], blob: bytes) -> Reply:
        self._env = {**os.environ, **header["env"]}
        return {"ready": True}, b""

    def _diff(self, header: dict[str, Any], blob: bytes) -> Reply:
        return {}, workspace_diff(self._place.template, self._place.workspace)

    def _batch(self, header: dict[str, Any], blob: bytes) -> Reply:
        calls = [ToolCall(str(call["name"]), call["arguments"]) for call in header["calls"]]
        results: list[ToolResult] = []
        for group in _groups(calls):
            results += self._run_group(group, float(header["timeout_s"]))
        return {"results": [asdict(result) for result in results]}, b""

    def _run_group(self, calls: list[ToolCall], timeout_s: float) -> list[ToolResult]:
        try:
            return self._run(calls, timeout_s)
        except ServerGone:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a call brings about is its answer, not the sandbox's end
            text = f"error: the tool failed: {type(error).__name__}"
            return [ToolResult(False, text, len(text))] * len(calls)

    def _run(self, calls: list[ToolCall], timeout_s: float) -> list[ToolResult]:
        if not _is_exec(calls[0]):
            return [self._run_file_tool(calls[0], timeout_s)]
        if self._shell is None:
            self._shell = Shell(self._place.workspace, self._place.scratch, self._env, self._sock.fileno())
        commands = []
        for call in calls:
            own = float(call.arguments.get("timeout_s", timeout_s))
            commands.append((str(call.arguments["command"]), min(timeout_s, own) if own > 0 else timeout_s))
        return self._shell.run(commands)

    def _run_file_tool(self, call: ToolCall, timeout_s: float) -> ToolResult:
        started = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, max(timeout_s, 0.001))
        try:
            result = run_file_tool(self._place.workspace, call)
        except _Deadline:
            text = f"timed out after {timeout_s:g} s"
            result = ToolResult(False, text, len(text), timed_out=True)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        seconds = time.monotonic() - started
        return ToolResult(result.ok, result.text, result.true_bytes, result.truncated, result.timed_out, seconds)


def prepare_process(env: dict[str, str]) -> None:
    """Start a sandbox's processes from a known state: umask, environment, standard streams."""
    os.umask(0o022)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.close(null)


def _is_exec(call: ToolCall) -> bool:
    return call.name == "exec" and check_arguments(call.name, call.arguments) is None


def _groups(calls: list[ToolCall]) -> Iterator[list[ToolCall]]:
    """Adjacent exec calls together, everything else alone: in this order each call sees what came before it."""
    group: list[ToolCall] = []
    for call in calls:
        if _is_exec(call):
            group.append(call)
            continue
        if group:
            yield group
            group = []
        yield [call]
    if group:
        yield group


def _on_alarm(number: int, frame: FrameType | None) -> None:
    raise _Deadline
