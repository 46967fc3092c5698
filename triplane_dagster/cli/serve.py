"""`triplane serve`: the live policy over an OpenAI-compatible API."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from contracts.artifacts import Artifact, ArtifactRef, list_artifacts, open_artifact
from contracts.errors import ArtifactMissing
from contracts.store import Store, open_store
from triplane_dagster.cli.options import ExperimentName


def serve(
    experiment: ExperimentName = "quickstart",
    policy: Annotated[
        str, typer.Option(help="Digest of a checkpoint (its first digits are enough), or base; default: the live one.")
    ] = "live",
    listen: Annotated[str, typer.Option(help="host:port to answer at.")] = "127.0.0.1:8000",
) -> None:
    """Serve a policy until Ctrl-C: /v1/chat/completions, /v1/completions (text or token ids), /v1/models, /health.

    Examples:

        triplane serve

        triplane serve --policy 3f9c2a71 --listen 0.0.0.0:8000
    """
    checkpoint = find_policy(open_store(), experiment, policy)
    typer.echo(f"serving policy {checkpoint.ref.short} at http://{listen}", err=True)
    command = [sys.executable, "-m", "inference", "serve", "--policy", str(checkpoint.directory())]
    command += ["--version", checkpoint.ref.digest, "--listen", listen]
    os.execv(sys.executable, command)


def find_policy(store: Store, experiment: str, policy: str) -> Artifact:
    """The checkpoint called `live`, `base`, or by the beginning of its digest. Raises ArtifactMissing."""
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
            f"{policy!r} begins the digests of {len(found)} checkpoints in {store.url}: `triplane status` shows them"
        )
    return open_artifact(store, next(iter(found.values())))
