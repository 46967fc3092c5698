"""What ends a command early: an error in one line, or Ctrl-C with a way to go on. TRIPLANE_DEBUG=1 shows tracebacks."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from contracts.errors import TriplaneError

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells use it."""


class GuardedGroup(TyperGroup):
    """The top of the command tree: no error of ours ends in a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Exits 1 after an error with a message of ours, 130 when interrupted."""
        try:
            return super().invoke(ctx)
        except BaseException as error:
            if os.environ.get("TRIPLANE_DEBUG"):
                raise
            cause = _our_error(error)
            if cause is not None:
                Console(stderr=True).print(f"[red]error:[/] {_escape(cause)}", soft_wrap=True, highlight=False)
                raise typer.Exit(1) from None
            if not _is_interrupt(error):
                raise
            command = "triplane " + shlex.join(sys.argv[1:])
            Console(stderr=True).print(
                f"\ninterrupted: committed work is kept, go on with `{_escape(command)}`",
                soft_wrap=True,
                highlight=False,
            )
            raise typer.Exit(INTERRUPTED) from None


def _our_error(error: BaseException) -> TriplaneError | None:
    """The TriplaneError that `error` is, or wraps (Dagster wraps what a step raises)."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, TriplaneError):
            return seen
        seen = seen.__cause__
    return None


def _is_interrupt(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt) or type(error).__name__ == "DagsterExecutionInterruptedError"


def _escape(message: object) -> str:
    from rich.markup import escape

    return escape(str(message))
