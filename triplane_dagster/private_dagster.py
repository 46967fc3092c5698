"""Everything that we use of Dagster although Dagster does not export it, each with the reason.

Private names may change in any release. `tests/dagster/test_private_dagster.py` checks them against the Dagster that is
installed, and that no other module imports private ones.
"""

from __future__ import annotations

# `triplane ui` loads the definitions once for web server and daemon, as `dagster dev` does, which has no API for it.
from dagster._cli.proxy_server_manager import ProxyServerManager

# `define_asset_job` returns it; without the name its callers would be untyped.
from dagster._core.definitions.unresolved_asset_job_definition import UnresolvedAssetJobDefinition

# An in-process run raises it for a failed blocking check; the public base class covers every other error as well.
# The client of a code server raises it when the server can't be reached.
from dagster._core.errors import DagsterAssetCheckFailedError, DagsterUserCodeUnreachableError

# The command line replaces `compute_logs.tail_to_stream`: how step output is mirrored has no setting.
from dagster._core.execution import compute_logs

# A run launcher answers run monitoring with them.
from dagster._core.launcher.base import CheckRunHealthResult, WorkerStatus

# Our web server is Dagster's with one more route; both are arguments of its constructor.
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import WorkspaceFileTarget

# The question whether a code server still executes a run, and the answer.
from dagster._grpc.types import CanCancelExecutionRequest, CanCancelExecutionResult

# The signature of a run launcher that dagster.yaml names.
from dagster._serdes.config_class import ConfigurableClassData

DAEMON_MODULE = "dagster._daemon"
"""Run by `python -m`, as the script `dagster-daemon` is not on PATH in every virtual environment."""

__all__ = [
    "CanCancelExecutionRequest",
    "CanCancelExecutionResult",
    "CheckRunHealthResult",
    "ConfigurableClassData",
    "DagsterAssetCheckFailedError",
    "DagsterUserCodeUnreachableError",
    "ProxyServerManager",
    "UnresolvedAssetJobDefinition",
    "WorkerStatus",
    "WorkspaceFileTarget",
    "WorkspaceProcessContext",
    "compute_logs",
]
