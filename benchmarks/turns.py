"""Programs that work in turn, each in a process of its own: one line in, one JSON line out.

A program writes its first line when it is ready, then waits for a line before each piece of work.
"""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from contracts.errors import TriplaneError

_LAST = 5
"""Lines of a program's errors that are kept."""


class Program:
    """A running program."""

    def __init__(self, name: str, process: subprocess.Popen[str], patience_s: float) -> None:
        self._name, self._process, self._patience = name, process, patience_s
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._complaints: list[str] = []
        self._listeners = [
            threading.Thread(target=target, daemon=True) for target in (self._listen, self._hear_complaints)
        ]
        for thread in self._listeners:
            thread.start()

    def hear(self) -> dict[str, Any]:
        """The program's next line. Raises TriplaneError if it ends or is silent for too long."""
        try:
            line = self._said.get(timeout=self._patience)
        except queue.Empty:
            raise TriplaneError(f"{self._name} was silent for {self._patience:g} seconds: run this again") from None
        if line is None:
            code = self._process.wait()
            self._listeners[1].join(5)
            last = " | ".join(self._complaints) or "no message"
            raise TriplaneError(f"{self._name} ended with status {code}: {last[-600:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def do(self, order: str) -> dict[str, Any]:
        """Let the program do one piece of work, and return what it answers."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(order + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `hear` tells why
        return self.hear()

    def _listen(self) -> None:
        for line in self._process.stdout or ():
            if line.startswith("{"):
                self._said.put(line)
        self._said.put(None)

    def _hear_complaints(self) -> None:
        for line in self._process.stderr or ():
            if line.strip():
                self._complaints[:] = [*self._complaints[1 - _LAST :], line.strip()]


@contextmanager
def program(name: str, command: Sequence[str], environment: Mapping[str, str], patience_s: float) -> Iterator[Program]:
    """Start a program and wait until it is ready; kill it at the end.

    patience_s: longest silence. Raises TriplaneError.
    """
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=dict(environment), text=True, **pipes)  # type: ignore[call-overload]
    try:
        running = Program(name, process, patience_s)
        running.hear()
        yield running
    finally:
        process.kill()
        process.wait()
