"""End a command early: print one line for an error, and how to continue after a signal.

TRIPLANE_DEBUG=1 shows tracebacks.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from triplane_dagster.cli.faults import line_of
from triplane_dagster.cli.interrupts import Interrupted, Terminated, is_interrupt, terminable


class GuardedGroup(TyperGroup):
    """Command group that prints Triplane's errors without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Exits 1 after an error of Triplane, and 130 or 143 after a signal, as shells do.
        """
        try:
            with terminable():
                return super().invoke(ctx)
        except BaseException as error:
            if os.environ.get("TRIPLANE_DEBUG"):
                raise
            if is_interrupt(error):
                number = signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT
                stopped = error if isinstance(error, Interrupted) else Interrupted(number)
                _say(f"\n{_escape(stopped)}")
                raise typer.Exit(stopped.exit_status) from None
            line = line_of(error)
            if line is None:
                raise
            _say(f"[red]error:[/] {_escape(line)}")
            raise typer.Exit(1) from None


def _say(line: str) -> None:
    Console(stderr=True).print(line, soft_wrap=True, highlight=False)


def _escape(message: object) -> str:
    from rich.markup import escape

    return escape(str(message))
