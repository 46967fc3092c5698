"""`triplane bridge`: serve hosted episodes of an experiment's tasks to a trainer that is not ours."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contracts.store import open_store
from triplane_dagster.cli.options import ExperimentName, Overrides

if TYPE_CHECKING:
    from inference.bridge.hosted.hosting import Hosting


def bridge(
    experiment: ExperimentName = "quickstart",
    policy: Annotated[
        str, typer.Option(help="Digest (or prefix) of a checkpoint, or base; default: the live policy.")
    ] = "live",
    listen: Annotated[
        str | None, typer.Option(help="unix:/path or host:port (default: a socket that only you can connect to).")
    ] = None,
    journal: Annotated[
        Path | None, typer.Option(help="Directory that lets episodes survive this process (default: they end with it).")
    ] = None,
    lease: Annotated[
        float, typer.Option(min=1, help="Seconds after which an episode that nobody asks for is freed.")
    ] = 600.0,
    max_episodes: Annotated[
        int, typer.Option(min=0, help="Open episodes at most; 0: the experiment's rollouts.concurrency.")
    ] = 0,
    key_file: Annotated[
        Path | None, typer.Option(help="Accepted bearer keys, one a line (default: on a port, one that is printed).")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Serve episodes whose environment the bridge plays: it makes the prompt of a task, executes the policy's calls
    in a sandbox, and grades the result as the experiment's rewards do.

    Sandboxes are those of the experiment (or of $TRIPLANE_ENVD). Name a running envd server with --journal: one that
    this command starts itself ends with it, and its sandboxes too.

    Examples:

        triplane bridge

        TRIPLANE_ENVD=unix:/run/envd.sock triplane bridge -e quickstart --journal /tmp/bridge
    """
    from contracts.rpc.listening import Listening
    from contracts.rpc.meeting import default_address
    from inference.bridge.registry import Bounds
    from inference.bridge.serve import SOCKET, Options, serve
    from ops.bridge_hosting import open_hosting
    from resources.refs import require_ref
    from resources.sandboxes import SandboxesResource
    from triplane_dagster.cli.experiments import find_experiment
    from triplane_dagster.cli.serve import find_policy

    store, found, sandboxes = open_store(), find_experiment(experiment, overrides), SandboxesResource()
    checkpoint = find_policy(store, found.name, policy)
    suite = require_ref(store, found.name, "task_suite")

    def opened() -> AbstractAsyncContextManager[Hosting]:
        return open_hosting(found, store, checkpoint, suite, sandboxes)

    options = Options(
        Listening(listen or default_address(SOCKET), key_file=key_file),
        Bounds(max_episodes or found.rollouts.concurrency, lease),
        journal,
        hosting=opened,
    )
    try:
        serve(checkpoint.directory(), checkpoint.ref.digest, options)
    finally:
        sandboxes.close()
