"""What we use of Dagster without Dagster exporting it is there, and has the form that we rely on."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import dagster as dg
import pytest

from contracts.syntax import parse_python
from triplane_dagster import private_dagster as private

ROOT = Path(__file__).parents[2]
PACKAGES = ("resources", "ops", "assets", "triplane_dagster", "benchmarks")
PRIVATE = ROOT / "triplane_dagster" / "private_dagster.py"


@pytest.mark.parametrize("package", PACKAGES)
def test_private_modules_of_dagster_are_imported_in_one_file(package: str) -> None:
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(parse_python(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [f"{path}: {name}" for name in names if name.startswith("dagster._") and path != PRIVATE]
    assert found == []


def test_an_asset_job_has_the_type_that_is_named() -> None:
    assert isinstance(dg.define_asset_job("some"), private.UnresolvedAssetJobDefinition)


def test_the_mirroring_of_step_output_is_looked_up_by_name() -> None:
    assert list(inspect.signature(private.compute_logs.tail_to_stream).parameters) == ["path", "stream"]
    assert "tail_to_stream(" in inspect.getsource(private.compute_logs.mirror_stream_to_file)


def test_run_monitoring_asks_a_launcher_by_the_methods_that_ours_has() -> None:
    monitored = vars(dg.DefaultRunLauncher.__mro__[1])
    assert {"check_run_worker_health", "supports_check_run_worker_health"} <= set(monitored)
    assert callable(dg.DefaultRunLauncher._get_grpc_client_for_termination)
    assert private.CheckRunHealthResult(private.WorkerStatus.FAILED, "gone").msg == "gone"
    answer = private.CanCancelExecutionResult(can_cancel=True)
    assert dg.deserialize_value(dg.serialize_value(answer), private.CanCancelExecutionResult).can_cancel


def test_ticks_of_a_cron_expression_are_iterated_in_its_time_zone() -> None:
    ticks = private.schedule_execution_time_iterator(0.0, "0 2 * * *", "Europe/Berlin")
    assert [next(ticks).isoformat() for _ in range(2)] == ["1970-01-01T02:00:00+01:00", "1970-01-02T02:00:00+01:00"]


def test_the_ui_starts_servers_by_arguments_that_dagster_takes() -> None:
    servers = inspect.signature(private.ProxyServerManager)
    servers.bind(None, private.WorkspaceFileTarget(["workspace.yaml"]), code_server_log_level="WARNING")
    assert callable(private.ProxyServerManager.get_code_server_specs)
    inspect.signature(private.WorkspaceProcessContext).bind(None, workspace_load_target=None, version="")


def test_the_daemon_takes_the_arguments_that_it_is_started_with() -> None:
    options = ["--log-level", "warning", "--workspace", "workspace.yaml", "--instance-ref", "{}"]
    command = [sys.executable, "-m", private.DAEMON_MODULE, "run", *options, "--help"]
    subprocess.run(command, capture_output=True, check=True)  # an unknown option is refused before help is shown
