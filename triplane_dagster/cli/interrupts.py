"""Handle SIGINT and SIGTERM in long commands: the first cleans up within seconds, a second one ends the command at
once.

    signal --(C level)--> wakeup pipe -> watcher: remembers the first, ends the process at the second or when cleaning
    up takes too long
           --(Python)---> whoever handles it now: `_raise`, Dagster during a run, an event loop's canceller during a
           step

The watcher handles cases that the others miss: Dagster drops a signal that arrives while it finishes a run, and blocked
code handles none. Python drops an error that a finalizer raises, so it is raised again shortly after.
"""

from __future__ import annotations

import atexit
import functools
import os
import select
import shlex
import signal
import sys
import threading
import time
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

GRACE_S = 8.0
"""Seconds to clean up. Remaining processes then exit by themselves: each child watches its parent, and committed work
needs no cleaning up.
"""
APART_S = 0.5
"""Signals within this many seconds of the first belong to the same request: a wrapper may forward a signal that the
terminal sends, too.
"""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SWALLOWED, _SOON_S = 0, 0.02
"""Byte in the wakeup pipe that is no signal: Python dropped the error of a signal, so raise it again soon."""


class Interrupted(BaseException):
    """Raised if the command was asked to stop. Not an Exception, so that fault handlers don't catch it."""

    def __init__(self, number: int, line: str | None = None) -> None:
        super().__init__(line or how_to_go_on(number))
        self.exit_status = 128 + number


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived at a command without `stoppable`. As Ctrl-C it gets out of event loops, which then clean up."""


@contextmanager
def terminable() -> Iterator[None]:
    """Context in which SIGTERM raises Terminated, unless a command handles it. Does nothing in other threads."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def how_to_go_on(number: int) -> str:
    """One line that an interrupted command prints."""
    command = "triplane " + shlex.join(sys.argv[1:])
    return f"interrupted ({signal.Signals(number).name}): committed work is kept, continue with `{command}`"


def is_interrupt(error: BaseException) -> bool:
    """Whether `error` results from a signal, here or in Dagster."""
    return (
        isinstance(error, (Interrupted, KeyboardInterrupt))
        or type(error).__name__ == "DagsterExecutionInterruptedError"
    )


class Interruption:
    """State of the signals received so far."""

    def __init__(self, line: str | None = None) -> None:
        self.line = line
        """Last line of the command; None: how to continue."""
        self.number: signal.Signals | None = None
        """First signal, or None."""
        self.ended = False
        """Whether the work has ended, so that its caller prints how to continue."""
        self._seen = threading.Event()

    def begin(self, number: signal.Signals) -> None:
        """Record the first signal."""
        self.number = number
        self._seen.set()

    def check(self, wait_s: float = 0.0) -> None:
        """Raise Interrupted if a signal has arrived. wait_s: time to wait for a signal that is known to be on its
        way.
        """
        if self._seen.wait(wait_s) and self.number is not None:
            raise Interrupted(self.number, self.line)


@contextmanager
def stoppable(line: str | None = None) -> Iterator[Interruption]:
    """Context in which signals raise, and errors after a signal become Interrupted. Main thread only.

    line: message of an interruption, if running the same command again is not the way to continue. After an
    interruption the process is watched until it exits.
    """
    state, stderr = Interruption(line), os.dup(2)  # Dagster points descriptor 2 at a log file while a step runs
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {number: signal.signal(number, _raise) for number in _SIGNALS}
    unraisable, sys.unraisablehook = sys.unraisablehook, functools.partial(_raise_later, sys.unraisablehook, writer)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(state, reader, stderr), name="interrupts", daemon=True)
    watcher.start()
    atexit.register(_leave, state)
    try:
        yield state
    except BaseException as error:
        state.check(wait_s=float(is_interrupt(error)))
        raise
    finally:
        state.ended = True
        for number in _SIGNALS:
            signal.signal(number, before[number] if state.number is None else _ignore)
        if state.number is None:
            sys.unraisablehook = unraisable
            atexit.unregister(_leave)
            signal.set_wakeup_fd(wakeup)
            os.close(writer)
            watcher.join()
            for descriptor in (reader, stderr):
                os.close(descriptor)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _ignore(number: int, frame: FrameType | None) -> None:
    """Signal handler that leaves the reaction to the watcher thread."""


def _raise_later(usual: Callable[[Any], Any], writer: int, lost: Any) -> None:
    """Hook for errors in finalizers: raises those of signals again and forwards the others."""
    if lost.exc_value is not None and is_interrupt(lost.exc_value):
        os.write(writer, bytes([_SWALLOWED]))
    else:
        usual(lost)


def _leave(state: Interruption) -> None:
    """Exit at once after an interruption: shutting down the interpreter with torch takes a second."""
    if state.number is not None:
        sys.stdout.flush()
        os._exit(128 + state.number)


def _watch(state: Interruption, reader: int, stderr: int) -> None:
    """Body of the watcher thread; ends with the block or with the process."""
    number = _first_signal(reader)
    if number is None:
        return
    state.begin(number)
    if not _wait_for_another(reader, number):
        return  # the work ended before this thread read the signal
    if not state.ended:
        os.write(stderr, f"\n{state.line or how_to_go_on(number)}\n".encode())
    os._exit(128 + number)


def _first_signal(reader: int) -> signal.Signals | None:
    while received := os.read(reader, 1):
        if received[0] in _SIGNALS:
            return signal.Signals(received[0])
    return None


def _wait_for_another(reader: int, number: signal.Signals) -> bool:
    """Wait for a second request, at most `GRACE_S` after the first. Returns False if no more can come.

    number: of the first.
    """
    first, own = time.monotonic(), 0
    while (left := first + GRACE_S - time.monotonic()) > 0:
        ready, _, _ = select.select([reader], [], [], left)
        received = os.read(reader, 64) if ready else b""
        if ready and not received:
            return False
        signals = sum(each in _SIGNALS for each in received)
        if signals > own and time.monotonic() - first > APART_S:
            return True
        own = max(0, own - signals)
        if _SWALLOWED in received:
            time.sleep(_SOON_S)
            own += 1
            interrupt_main(number)
    return True
