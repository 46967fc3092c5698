"""Runs the Kubernetes launcher as an op does. (No postponed annotations: Dagster reads the op's own.)"""

from collections.abc import Mapping
from typing import Any

import dagster as dg

from resources.kubernetes.launcher import KubernetesLauncher
from resources.launch import Launch
from tests.ports import free_port


def launch_as_job(launch: Launch, **options: Any) -> list[Mapping[str, Any]]:
    """Run a launch in an op of its own. Returns its messages; raises what the launcher raised."""
    launcher = KubernetesLauncher(**{"poll_s": 0.1, "port": free_port(), **options})
    messages: list[Mapping[str, Any]] = []

    @dg.op
    def run(context: dg.OpExecutionContext) -> None:
        returned = launcher.run(context, launch, messages.append)
        # messages of earlier attempts are passed on, too
        assert returned == messages[len(messages) - len(returned) :]

    @dg.job
    def once() -> None:
        run()

    try:
        once.execute_in_process()
    except dg.DagsterExecutionStepExecutionError as error:
        assert error.__cause__ is not None
        raise error.__cause__ from None
    return messages
