"""Runs the local launcher as an op does. (No postponed annotations: Dagster reads the op's own.)"""

import time
from typing import Any

import dagster as dg

from resources.launch import Launch, Launcher

Arrived = list[tuple[float, Any]]
"""Each message with when it arrived."""


def launch_in_an_op(launcher: Launcher, command: list[str], arrived: Arrived, **options: Any) -> None:
    """Run a command in an op of its own. Raises what the launcher raised."""

    @dg.op
    def run(context: dg.OpExecutionContext) -> None:
        messages = launcher.run(
            context, Launch(command, **options), lambda message: arrived.append((time.monotonic(), message))
        )
        assert messages == [message for _, message in arrived]

    @dg.job
    def once() -> None:
        run()

    try:
        once.execute_in_process()
    except dg.DagsterExecutionStepExecutionError as error:
        assert error.__cause__ is not None
        raise error.__cause__ from None
