"""`triplane serve`: serve the live policy over an OpenAI-compatible API."""

from __future__ import annotations

import functools
import math
import os
import sys
from typing import Annotated

import typer

from contracts.artifacts import Artifact, ArtifactRef, list_artifacts, open_artifact
from contracts.errors import ArtifactMissing, ConfigError
from contracts.store import Store, open_store
from triplane_dagster.cli.experiments import name_in_store
from triplane_dagster.cli.options import ExperimentName


def serve(
    experiment: ExperimentName = "quickstart",
    policy: Annotated[
        str, typer.Option(help="Digest (or prefix) of a checkpoint, or base; default: the live policy.")
    ] = "live",
    listen: Annotated[str, typer.Option(help="host:port to listen on.")] = "127.0.0.1:8000",
    follow: Annotated[
        bool, typer.Option("--follow", help="Swap to each policy that goes live (also by rollback) without a pause.")
    ] = False,
    poll: Annotated[float, typer.Option(min=0.01, help="Seconds between two checks of the live policy.")] = 2.0,
    wait: Annotated[
        float, typer.Option(min=0, help="With --follow: longest wait for a first policy, in seconds; 0: for ever.")
    ] = 0.0,
    drain: Annotated[
        float | None,
        typer.Option(
            min=0, help="Seconds in which requests are still accepted after SIGTERM [default: 5 in a pod, else 0]."
        ),
    ] = None,
) -> None:
    """Serve a policy until Ctrl-C: /v1/chat/completions, /v1/completions (text or token ids), /v1/models, /health and
    /ready.

    Requests in flight during a swap continue: their policy_spans name the policy of each token. With --follow the
    server starts before any policy exists; /ready returns 503 until it can serve the live one. SIGTERM drains: /ready
    returns 503, requests are answered to the end, and the exit code is 0.

    Examples:

        triplane serve

        triplane serve --follow --poll 1

        triplane serve --policy 3f9c2a71 --listen 0.0.0.0:8000
    """
    if follow:
        if policy != "live":
            raise ConfigError(
                f"--follow serves the live policy, --policy {policy} a fixed one: use one of the two options"
            )
        _serve_live(open_store(), experiment, listen, poll, wait or math.inf, drain)
        return
    checkpoint = asked_policy(open_store(), experiment, policy)
    typer.echo(f"serving policy {checkpoint.ref.short} at http://{listen}", err=True)
    command = [sys.executable, "-m", "inference", "serve", "--policy", str(checkpoint.directory())]
    command += ["--version", checkpoint.ref.digest, "--listen", listen]
    command += [] if drain is None else ["--drain", str(drain)]
    os.execv(sys.executable, command)


def _serve_live(
    store: Store, experiment: str, listen: str, poll_s: float, wait_s: float, drain_s: float | None
) -> None:
    from inference.server.draining import default_drain_s
    from inference.server.follow import Wanted
    from inference.server.serve import Following, Serving, serve_live

    @functools.cache
    def name() -> str:
        return name_in_store(store, experiment)  # looked up until it is found: the store may get it later

    def live() -> Wanted:
        checkpoint = find_policy(store, name(), "live")
        return Wanted(checkpoint.ref.digest, checkpoint.directory)

    typer.echo(f"serving the live policy of {experiment} at http://{listen}", err=True)
    serving = Serving(listen, drain_s=default_drain_s() if drain_s is None else drain_s)
    try:
        serve_live(Following(live, poll_s, wait_s), serving)
    except KeyboardInterrupt:
        return


def asked_policy(store: Store, experiment: str, policy: str) -> Artifact:
    """`find_policy` for an experiment as the command line names it. A digest needs none. Raises also ConfigError."""
    name = name_in_store(store, experiment) if policy in ("live", "base") else experiment
    return find_policy(store, name, policy)


def find_policy(store: Store, experiment: str, policy: str) -> Artifact:
    """Checkpoint for `live`, `base` or a digest prefix. Raises ArtifactMissing."""
    from resources.refs import require_ref
    from resources.registry import Registry

    live = Registry(store, experiment).live() if policy == "live" else None
    if live is not None:
        return open_artifact(store, live.policy)
    if policy in ("live", "base"):
        return open_artifact(store, require_ref(store, experiment, "base_policy"))
    found: dict[str, ArtifactRef] = {
        each.ref.digest: each.ref for each in list_artifacts(store, "checkpoint") if each.ref.digest.startswith(policy)
    }
    if len(found) != 1:
        raise ArtifactMissing(
            f"{policy!r} matches {len(found)} checkpoints in {store.url}, expected one: `triplane status` lists them"
        )
    return open_artifact(store, next(iter(found.values())))
