"""Dagster web server that also serves reports: ROUTE/<action key> is the page of that `report` artifact.

`triplane ui` starts it; deployments with separate Dagster services run `python -m triplane_dagster.webserver` instead
of `dagster-webserver`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import dagster as dg
import typer
import uvicorn
from dagster_webserver.version import __version__
from dagster_webserver.webserver import DagsterWebserver
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from contracts.artifacts import find_artifact
from contracts.errors import TriplaneError
from contracts.http_connections import BoundedConnection
from contracts.store import open_store
from inference.server.listening import own_hosts_only
from ops.report import ROUTE
from triplane_dagster.private_dagster import WorkspaceFileTarget, WorkspaceProcessContext

SANDBOX = {"Content-Security-Policy": "sandbox allow-scripts allow-popups", "X-Content-Type-Options": "nosniff"}
"""A report contains text of a policy: the sandbox gives its scripts no origin, and so no access to the server's
GraphQL.
"""
GRACE_S = 3
"""Seconds for open connections to close when the server stops."""


class ReportingWebserver(DagsterWebserver[Any, Any]):
    """Dagster's web server with a route for reports."""

    def build_routes(self) -> list[BaseRoute]:
        """Report routes, followed by Dagster's, whose last one matches everything."""
        return [Route(f"{ROUTE}/{{key}}", report_page), *super().build_routes()]  # type: ignore[no-untyped-call]


def report_page(request: Request) -> Response:
    """Serve the page of a `report` artifact after checking it against its manifest; no other file is reachable."""
    key = request.path_params["key"]
    if not re.fullmatch("[0-9a-f]{64}", key):
        return PlainTextResponse(f"a report's address is {ROUTE}/ and the 64 hex digits of its action key", 404)
    try:
        store = open_store()
        report = find_artifact(store, "report", key)
        if report is None:
            return PlainTextResponse(f"no report {key[:12]} in {store.url}: materialize its report asset again", 404)
        return FileResponse(report.path("report.html"), media_type="text/html", headers=SANDBOX)
    except TriplaneError as error:
        return PlainTextResponse(f"report {key[:12]} can't be shown: {error}", 500)


def serve(instance: dg.DagsterInstance, workspace: Path, host: str, port: int) -> None:
    """Serve until interrupted. workspace: a workspace.yaml."""
    instance.optimize_for_webserver(statement_timeout=15_000, pool_recycle=3600, max_overflow=20)
    target = WorkspaceFileTarget([str(workspace)])
    with WorkspaceProcessContext(instance, workspace_load_target=target, version=__version__) as context:
        app = own_hosts_only(ReportingWebserver(context, live_data_poll_rate=2000).create_asgi_app(), host)
        uvicorn.run(
            app, host=host, port=port, http=BoundedConnection, log_level="warning", timeout_graceful_shutdown=GRACE_S
        )


def main(
    workspace: Annotated[Path, typer.Option("--workspace", "-w", help="workspace.yaml with the code location.")] = Path(
        "workspace.yaml"
    ),
    host: Annotated[str, typer.Option("--host", "-h", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", help="Port to listen on.")] = 3000,
) -> None:
    """Serve the Dagster UI and reports. The instance is $DAGSTER_HOME, else that of ./dagster.yaml."""
    from triplane_dagster.experiment_files import experiments_folder, load_folder
    from triplane_dagster.pools import limit_pools
    from triplane_dagster.run import open_instance
    from triplane_dagster.ticks import forget_future_ticks

    with open_instance() as instance:
        forget_future_ticks(instance)
        limit_pools(instance, load_folder(experiments_folder()).experiments)
        serve(instance, workspace, host, port)


if __name__ == "__main__":
    typer.run(main)
