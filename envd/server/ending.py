"""A bound on the time that a server takes to end after a process that it needs has died."""

from __future__ import annotations

import asyncio
import faulthandler
import sys
from collections.abc import Iterator
from typing import Any

_STACKS_S, _EXIT_S = 20.0, 60.0


def bound_end(stacks_s: float = _STACKS_S, exit_s: float = _EXIT_S) -> None:
    """Have this process end: print the stacks of all tasks after `stacks_s` seconds, exit with 1 after `exit_s`.

    It then exits without cleaning up. The processes that started sandboxes remove those once their connections close.
    """
    asyncio.get_running_loop().call_later(stacks_s, _print_stacks, stacks_s)
    faulthandler.dump_traceback_later(exit_s, exit=True)


def _print_stacks(seconds: float) -> None:
    lines = [f"envd: the server has not ended within {seconds:g} s; its tasks wait here:"]
    for task in asyncio.all_tasks():
        lines += [f"{task.get_name()}:", *_stack(task.get_coro())]
    print("\n".join(lines), file=sys.stderr, flush=True)


def _stack(waiting: Any) -> Iterator[str]:
    """Outermost call first. `Task.print_stack` shows only that one of a task that waits."""
    while waiting is not None:
        kind = next((each for each in ("cr", "gi", "ag") if hasattr(waiting, f"{each}_frame")), "")
        frame = getattr(waiting, f"{kind}_frame", None)
        if frame is None:
            yield f"  {waiting!r}"
            return
        yield f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_qualname}'
        waiting = getattr(waiting, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
