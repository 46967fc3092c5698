"""`triplane ui`: run the Dagster web server with the asset graph and reports, and the daemon for schedules and
sensors.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from contracts.addresses import Address, require_free
from contracts.errors import ConfigError
from contracts.retries import backoff_s
from trainer.lifetime import PARENT_VARIABLE

if TYPE_CHECKING:
    from dagster import DagsterInstance

GRACE_S = 20.0
"""Seconds for the daemon to exit, since it may be launching a run."""
POLL_S = 0.5
STEADY_S = 60.0
"""Seconds after which a daemon counts as one that ran well."""


def ui(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 3000,
) -> None:
    """Open the asset graph in the Dagster UI. It shares one history with `triplane iterate`.

    Example:

        triplane ui --port 3001
    """
    definitions = project_workspace()
    require_free(host, port, "--host or --port")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no process outlives this one
    typer.echo(f"{Address(host, port).url} (Ctrl-C stops it)", err=True)
    os.environ.setdefault("DAGSTER_DISABLE_TELEMETRY", "1")
    from triplane_dagster.dead_runs import end_dead_runs
    from triplane_dagster.experiment_files import experiments_folder, load_folder
    from triplane_dagster.pools import limit_pools
    from triplane_dagster.run import open_instance
    from triplane_dagster.webserver import serve

    # records, store and experiments are those of this folder, as for every other command
    with open_instance() as instance, alone(Path(os.environ.get("DAGSTER_HOME") or ".").resolve()):
        end_dead_runs(instance)  # they would occupy the queue's only slot
        limit_pools(instance, load_folder(experiments_folder()).experiments)
        with code_servers(instance, definitions) as workspace, daemon(instance, workspace):
            serve(instance, workspace, host, port)


@contextmanager
def alone(home: Path) -> Iterator[None]:
    """Lock for the only UI of an instance, since two daemons would launch every run twice. Raises ConfigError."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".triplane-ui.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"`triplane ui` is already running for {home}: use it, or stop it first") from None
        yield


@contextmanager
def code_servers(instance: DagsterInstance, definitions: Path) -> Iterator[Path]:
    """Start processes that load the definitions of a workspace file once for all clients, as `dagster dev` does.

    Yields a workspace file with their addresses.
    """
    from triplane_dagster.private_dagster import ProxyServerManager, WorkspaceFileTarget

    with (
        ProxyServerManager(
            instance, WorkspaceFileTarget([str(definitions)]), code_server_log_level="WARNING"
        ) as servers,
        tempfile.TemporaryDirectory() as folder,
    ):
        workspace = Path(folder) / "workspace.yaml"
        workspace.write_text(yaml.safe_dump({"load_from": [dict(spec) for spec in servers.get_code_server_specs()]}))
        yield workspace


@contextmanager
def daemon(instance: DagsterInstance, workspace: Path) -> Iterator[None]:
    """Keep the daemon for queue, schedules and sensors running until the block ends."""
    from dagster import serialize_value

    module = [sys.executable, "-m", "triplane_dagster.daemon", "run", "--log-level", "warning"]
    command = [*module, "--workspace", str(workspace), "--instance-ref", serialize_value(instance.get_ref())]
    over = threading.Event()
    keeper = threading.Thread(target=keep_running, args=(command, over), name="daemon-keeper")
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()


def keep_running(command: Sequence[str], over: threading.Event) -> None:
    """Run a command until `over` is set; one that ends before is started again. It may end with its parent, which this
    thread is for the kernel.
    """
    failures = 0
    while True:
        child = subprocess.Popen(command, env={**os.environ, PARENT_VARIABLE: str(os.getpid())})
        started = time.monotonic()
        while child.poll() is None and not over.wait(POLL_S):
            pass
        if over.is_set():
            break
        failures = 1 if time.monotonic() - started > STEADY_S else failures + 1
        pause = backoff_s(failures, 1.0, 60.0)
        typer.echo(f"Dagster's daemon ended with code {child.returncode}; starting it again in {pause:.0f} s", err=True)
        if over.wait(pause):
            return
    child.terminate()
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def project_workspace() -> Path:
    """workspace.yaml of the working directory, else of the repository. Raises ConfigError."""
    for folder in (Path(), Path(__file__).parents[2]):
        if (folder / "workspace.yaml").is_file():
            return folder / "workspace.yaml"
    raise ConfigError(f"no workspace.yaml in {Path.cwd()}: run this in a clone of the repository")
