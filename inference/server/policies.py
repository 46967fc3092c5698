"""Policies by their directories, or by the digits of their artifacts. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from contracts.artifacts import ArtifactRef, list_artifacts, open_artifact
from contracts.errors import ArtifactMissing, ConfigError
from contracts.store import Store, open_store

CHECKPOINTS = ("checkpoint", "base_policy")
"""Kinds of artifacts that are checkpoints."""


def find_policy(policy: str, store: str | None) -> tuple[Path, str]:
    """Checkpoint directory and version of `policy`.

    policy: a directory, or the first digits (at least 6) of a checkpoint artifact's content digest or action key in the
    store.
    """
    directory = Path(policy)
    if directory.is_dir():
        return directory, directory.resolve().name
    if len(policy) < 6:
        raise ConfigError(f"--policy {policy}: no such directory, and too short for a digest (6 digits at least)")
    opened = open_store(store)
    ref = find_checkpoint(policy, opened, "--policy")
    return open_artifact(opened, ref).directory(), ref.digest


def find_checkpoint(digits: str, store: Store, option: str) -> ArtifactRef:
    """The only checkpoint whose content digest or action key starts with `digits`.

    option: of the command line, for messages. Raises ArtifactMissing, ConfigError.
    """
    found: dict[str, ArtifactRef] = {
        artifact.ref.digest: artifact.ref
        for kind in CHECKPOINTS
        for artifact in list_artifacts(store, kind)
        if artifact.ref.digest.startswith(digits) or artifact.ref.key.startswith(digits)
    }
    if not found:
        raise ArtifactMissing(f"{option} {digits}: neither a directory nor a checkpoint in store {store.url}")
    if len(found) > 1:
        raise ConfigError(f"{option} {digits} matches {len(found)} checkpoints of store {store.url}: give more digits")
    (ref,) = found.values()
    return ref
