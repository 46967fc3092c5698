"""`triplane bridge`: serve hosted episodes of an experiment's tasks to a trainer that is not ours."""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contracts.artifacts import Artifact, ArtifactRef
from contracts.store import Store, open_store
from inference.bridge import options
from triplane_dagster.cli.options import ExperimentName, Overrides

if TYPE_CHECKING:
    from inference.bridge.hosted.hosting import Hosting

LOOK_S = 2.0
"""Time between two looks for a policy and tasks, in seconds."""


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
    wait: Annotated[
        float,
        typer.Option(
            min=0, help="Longest wait for a policy, tasks and --policy-file that do not exist yet, in seconds."
        ),
    ] = 0.0,
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
    from resources.sandboxes import SandboxesResource
    from triplane_dagster.cli.experiments import find_experiment

    store, found, sandboxes = open_store(), find_experiment(experiment, overrides), SandboxesResource()
    checkpoint, suite = _awaited(store, found.name, policy, policy_file, wait)

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


def _awaited(
    store: Store, experiment: str, policy: str, file: Path | None, wait_s: float
) -> tuple[Artifact, ArtifactRef]:
    """A policy and the tasks of an experiment, as soon as it has both and there is a `file`, if one is named.

    Raises as `find_policy`, and NotMaterialized after `wait_s` seconds.
    """
    from resources.errors import NotMaterialized
    from resources.refs import require_ref
    from triplane_dagster.cli.interrupts import stoppable
    from triplane_dagster.cli.serve import find_policy

    deadline, said = time.monotonic() + wait_s, ""
    with stoppable("the bridge was stopped before it had a policy and tasks to serve"):
        while True:
            over = time.monotonic() >= deadline
            try:
                found = find_policy(store, experiment, policy), require_ref(store, experiment, "task_suite")
                if over or file is None or file.exists():
                    return found
                reason = f"--policy-file {file} does not exist"
            except NotMaterialized as error:
                if over:
                    raise
                reason = str(error)
            if reason != said:
                said = reason
                typer.echo(f"waiting: {reason}", err=True)
            time.sleep(LOOK_S)
