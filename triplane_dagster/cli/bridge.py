"""`triplane bridge`: serve hosted episodes of an experiment's tasks to a trainer that is not ours."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contracts.store import open_store
from inference.bridge import options
from triplane_dagster.cli.options import ExperimentName, Overrides

if TYPE_CHECKING:
    from inference.bridge.hosted.hosting import Hosting


def bridge(
    experiment: ExperimentName = "quickstart",
    policy: Annotated[
        str, typer.Option(help="Digest (or prefix) of a checkpoint, or base; default: the live policy.")
    ] = "live",
    policy_file: Annotated[
        Path | None,
        typer.Option(
            help="A file whose first line names the policy to sample with; another one is served when it changes."
            " --policy is then only the one whose tokenizer is used."
        ),
    ] = None,
    listen: options.Listen = None,
    journal: options.JournalFolder = None,
    lease: options.Lease = 600.0,
    drain: options.Drain = 30.0,
    max_episodes: Annotated[
        int, typer.Option(min=0, help="Open episodes at most; 0: the experiment's rollouts.concurrency.")
    ] = 0,
    key_file: options.KeyFile = None,
    tls_cert: options.TlsCert = None,
    tls_key: options.TlsKey = None,
    tls_client_ca: options.TlsClientCa = None,
    insecure: options.Insecure = False,
    metrics: options.Metrics = None,
    overrides: Overrides = None,
) -> None:
    """Serve episodes whose environment the bridge plays: it makes the prompt of a task, executes the policy's calls
    in a sandbox, and grades the result as the experiment's rewards do.

    Engine and sandboxes are those of the experiment (or of $TRIPLANE_ENVD). Name a running envd server with --journal:
    one that this command starts itself ends with it, and its sandboxes too.

    Examples:

        triplane bridge

        TRIPLANE_ENVD=unix:/run/envd.sock triplane bridge -e quickstart --journal /tmp/bridge

        triplane bridge --policy base --policy-file /tmp/policy     # a trainer publishes weights by this file

        triplane bridge --set engine.kind=openai --set engine.base_url=http://127.0.0.1:8000/v1
    """
    from contracts.rpc.listening import Listening
    from contracts.rpc.meeting import default_address
    from inference.bridge.policy_file import PolicyFile
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

    followed = None if policy_file is None else PolicyFile(policy_file, store.url)
    listening = Listening(listen or default_address(SOCKET), tls_cert, tls_key, tls_client_ca, key_file, insecure)
    bounds = Bounds(max_episodes or found.rollouts.concurrency, lease)
    served = Options(
        listening, bounds, journal, drain, found.engine, policies=followed, hosting=opened, metrics=metrics
    )
    directory, version = followed.read() if followed else (checkpoint.directory(), checkpoint.ref.digest)
    try:
        serve(directory, version, served)
    finally:
        sandboxes.close()
