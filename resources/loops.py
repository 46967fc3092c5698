"""Event loops that handle signals: the signal cancels the work, which cleans up, and then reaches its usual handler."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, but SIGINT and SIGTERM cancel the work; Dagster's handler would raise in the middle of it.

    asyncio logs and drops an exception that is raised in a callback of the loop. So a signal cancels `work` here; after
    `work` has ended, the previous handler gets the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(work)
    received: list[signal.Signals] = []

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"

        def stop(number: int, frame: FrameType | None) -> None:
            if not received:
                received.append(signal.Signals(number))
                loop.call_soon_threadsafe(task.cancel)

        for number in _SIGNALS:
            signal.signal(number, stop)
        return await work

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        return asyncio.run(cancellable())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if received:
            _hand_on(received[0], before[received[0]])


def _hand_on(number: signal.Signals, handler: Any) -> None:
    """Call the previous handler of a signal; sending the signal again would count as a second signal."""
    if callable(handler):
        handler(number, None)
    else:
        signal.raise_signal(number)
