"""`triplane ui`: the asset graph in the Dagster web server, with the daemon that runs schedules and sensors."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from contracts.errors import ConfigError


def ui(
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 3000,
) -> None:
    """Open the asset graph in the Dagster UI; iterations launched there and by `triplane iterate` share one history.

    Example:

        triplane ui --port 3001
    """
    root = project_root()
    typer.echo(f"http://{host}:{port} (Ctrl-C stops it)", err=True)
    os.environ.setdefault("DAGSTER_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TRIPLANE_STORE", str(Path(".triplane/store").absolute()))
    os.chdir(root)
    _free_the_queue()
    command = [
        sys.executable,
        "-m",
        "dagster",
        "dev",
        "--workspace",
        "workspace.yaml",
        "--host",
        host,
        "--port",
        str(port),
    ]
    os.execv(sys.executable, command)


def _free_the_queue() -> None:
    """A killed in-process run would hold the queue's only slot."""
    from triplane_dagster.dead_runs import cancel_dead_runs
    from triplane_dagster.run import open_instance

    with open_instance() as instance:
        cancel_dead_runs(instance)


def project_root() -> Path:
    """The folder with workspace.yaml: the working directory, else the repository. Raises ConfigError."""
    for folder in (Path.cwd(), Path(__file__).parents[2]):
        if (folder / "workspace.yaml").is_file():
            return folder
    raise ConfigError(f"no workspace.yaml in {Path.cwd()}: run this in a clone of the repository")
