"""All uses of Dagster's private names, each with its reason.

Private names may change in any release. `tests/dagster/test_private_dagster.py` checks them against the installed
Dagster, and that no other module imports private names.
"""

from __future__ import annotations

# `triplane ui` loads the definitions once for web server and daemon, as `dagster dev` does, which has no API for it.
from dagster._cli.proxy_server_manager import ProxyServerManager

# `define_asset_job` returns it; without the name its callers would be untyped.
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

# The client of a code server raises it when the server can't be reached.
from dagster._core.errors import DagsterUserCodeUnreachableError

# What an event of a step handler needs, even if there is nothing to add.
from dagster._core.events import EngineEventData

# The command line replaces `compute_logs.tail_to_stream`: mirroring of step output has no setting.
from dagster._core.execution import compute_logs

# Executor of step pods, and its handler: how often pods are checked, and what a failed check says, have no setting.
from dagster._core.executor.step_delegating import (
    CheckStepHealthResult,
    StepDelegatingExecutor,
    StepHandler,
    StepHandlerContext,
)

# Replies of a run launcher to run monitoring.
from dagster._core.launcher.base import CheckRunHealthResult, WorkerStatus

# Constructor arguments of the web server, which adds one route to Dagster's.
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import WorkspaceFileTarget

# Request and reply for whether a code server still executes a run.
from dagster._grpc.types import CanCancelExecutionRequest, CanCancelExecutionResult

# Signature of a run launcher that dagster.yaml names.
from dagster._serdes.config_class import ConfigurableClassData

# Pauses between the ticks of a cron expression; schedules have no public iterator.
from dagster._utils.schedules import schedule_execution_time_iterator

DAEMON_MODULE = "dagster._daemon"
"""Run by `python -m`, since the script `dagster-daemon` may not be on PATH."""

__all__ = [
    "CanCancelExecutionRequest",
    "CanCancelExecutionResult",
    "CheckRunHealthResult",
    "CheckStepHealthResult",
    "ConfigurableClassData",
    "DagsterUserCodeUnreachableError",
    "EngineEventData",
    "ProxyServerManager",
    "StepDelegatingExecutor",
    "StepHandler",
    "StepHandlerContext",
    "UnresolvedAssetJobDefinition",
    "WorkerStatus",
    "WorkspaceFileTarget",
    "WorkspaceProcessContext",
    "compute_logs",
    "schedule_execution_time_iterator",
]
