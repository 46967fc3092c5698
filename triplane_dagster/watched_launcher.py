"""Run launcher for production: Dagster's default launcher that also detects the loss of a run's code server.

Dagster's launcher lacks this: after a code server dies with the run inside it, no process marks the run as failed, and
the run occupies its experiment's place in the queue forever. Run monitoring calls this launcher; `run_retries` then
launches the run again.
"""

from __future__ import annotations

from typing import Any

from dagster import DagsterRun, DefaultRunLauncher, deserialize_value

from triplane_dagster.private_dagster import (
    CanCancelExecutionRequest,
    CanCancelExecutionResult,
    CheckRunHealthResult,
    ConfigurableClassData,
    DagsterUserCodeUnreachableError,
    WorkerStatus,
)

ANSWER_S = 20
"""Timeout for a reply of the code server, in seconds."""


class WatchedRunLauncher(DefaultRunLauncher):
    """Launches runs in the code server and checks that they still run there.

    Requires servers of `dagster api grpc`, which know all their runs.
    """

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData, config_value: Any) -> WatchedRunLauncher:
        """Construct the launcher; Dagster calls this with the (empty) configuration of dagster.yaml."""
        return cls(inst_data=inst_data)

    @property
    def supports_check_run_worker_health(self) -> bool:
        """Return True: Dagster may check the health of runs."""
        return True

    def check_run_worker_health(self, run: DagsterRun) -> CheckRunHealthResult:
        """Health of a run; FAILED only if the code server replies that it does not execute the run.

        An unreachable server may be starting: Dagster checks again later.
        """
        client = self._get_grpc_client_for_termination(run.run_id)  # type: ignore[no-untyped-call]
        if client is None:
            return CheckRunHealthResult(WorkerStatus.SUCCESS, "the run has ended")
        try:
            answer = client.can_cancel_execution(CanCancelExecutionRequest(run_id=run.run_id), timeout=ANSWER_S)
        except DagsterUserCodeUnreachableError:
            return CheckRunHealthResult(WorkerStatus.RUNNING, f"{client.host} does not reply: checking again later")
        if deserialize_value(answer, CanCancelExecutionResult).can_cancel:
            return CheckRunHealthResult(WorkerStatus.RUNNING)
        return CheckRunHealthResult(
            WorkerStatus.FAILED, f"code server {client.host} executes no such run: it was restarted"
        )
