"""`triplane ui`: run the Dagster web server with the asset graph and reports, and the daemon for schedules and
sensors.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from contracts.addresses import Address, require_free
from contracts.errors import ConfigError
from contracts.processes import end_process
from contracts.retries import backoff_s
from trainer.lifetime import PARENT_VARIABLE

if TYPE_CHECKING:
    from dagster import DagsterInstance

GRACE_S = 20.0
"""Seconds for the daemon to exit, since it may be launching a run."""
POLL_S = 0.5
STEADY_S = 60.0
"""Seconds after which a daemon counts as one that ran well."""
SET_BACK_S = 30.0
"""Step back of the clock, in seconds, after which the daemon is started again: it would wait for the time before."""


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
    home = Path(os.environ.get("DAGSTER_HOME") or ".").resolve()
    with open_instance() as instance, alone(home):
        end_dead_runs(instance)  # they would occupy the queue's only slot
        limit_pools(instance, load_folder(experiments_folder()).experiments)
        with code_servers(instance, definitions, home) as workspace, daemon(instance, workspace):
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
def code_servers(instance: DagsterInstance, definitions: Path, home: Path) -> Iterator[Path]:
    """Start processes that load the definitions of a workspace file once for all clients, as `dagster dev` does.

    Yields a workspace file with their addresses, in `home`: from the temporary folder it might be removed for its age,
    and no daemon would start again.
    """
    from triplane_dagster.private_dagster import ProxyServerManager, WorkspaceFileTarget

    target, workspace = WorkspaceFileTarget([str(definitions)]), home / ".triplane-ui.yaml"
    with ProxyServerManager(instance, target, code_server_log_level="WARNING") as servers:
        workspace.write_text(yaml.safe_dump({"load_from": [dict(spec) for spec in servers.get_code_server_specs()]}))
        yield workspace
    workspace.unlink(missing_ok=True)


@contextmanager
def daemon(instance: DagsterInstance, workspace: Path) -> Iterator[None]:
    """Keep the daemon for queue, schedules and sensors running until the block ends."""
    from dagster import serialize_value

    from triplane_dagster.ticks import forget_future_ticks

    module = [sys.executable, "-m", "triplane_dagster.daemon", "run", "--log-level", "warning"]
    command = [*module, "--workspace", str(workspace), "--instance-ref", serialize_value(instance.get_ref())]
    over = threading.Event()
    arguments = (command, over, lambda: forget_future_ticks(instance))
    keeper = threading.Thread(target=keep_running, args=arguments, name="daemon-keeper")
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()


def keep_running(command: Sequence[str], over: threading.Event, before: Callable[[], object] = lambda: None) -> None:
    """Run a command until `over` is set; start it again if it ends before, or if the clock is set back. It may end with
    its parent, which this thread is for the kernel. before: called before each start.
    """
    failures = 0
    while not over.is_set():
        started = time.monotonic()
        try:
            before()
            said = _run_until(command, over)
        except Exception as error:  # noqa: BLE001 (also whatever the database's driver raises, on a full disk)
            said = f"could not be started ({error})"
        failures = 1 if time.monotonic() - started > STEADY_S else failures + 1
        pause = backoff_s(failures, 1.0, 60.0)
        if not over.is_set():
            typer.echo(f"Dagster's daemon {said}; starting it again in {pause:.0f} s", err=True)
            over.wait(pause)


def _run_until(command: Sequence[str], over: threading.Event) -> str:
    """Run a command until `over` is set, or the clock is set back. Returns why it ended."""
    child, lead = subprocess.Popen(command, env={**os.environ, PARENT_VARIABLE: str(os.getpid())}), _clock_lead()
    try:
        while child.poll() is None and not over.wait(POLL_S):
            lead = max(lead, _clock_lead())  # higher after each pause of the machine
            if lead - _clock_lead() > SET_BACK_S:
                return f"was stopped, since the clock was set back by {lead - _clock_lead():.0f} s"
        return f"ended with code {child.returncode}"
    finally:
        if child.poll() is None:
            end_process(child, GRACE_S)


def _clock_lead() -> float:
    """Seconds between the clock and the time since boot, which nobody can set."""
    return time.time() - time.monotonic()


def project_workspace() -> Path:
    """workspace.yaml of the working directory, else of the repository. Raises ConfigError."""
    for folder in (Path(), Path(__file__).parents[2]):
        if (folder / "workspace.yaml").is_file():
            return folder / "workspace.yaml"
    raise ConfigError(f"no workspace.yaml in {Path.cwd()}: run this in a clone of the repository")
