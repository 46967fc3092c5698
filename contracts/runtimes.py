"""Runtimes in a store: artifacts of the kind `runtime`, by the digest that tasks name.

A runtime is packages (packages.tar, files only) or a whole root file system (root.tar, which begins with its root).
"""

from __future__ import annotations

from pathlib import Path

from contracts.artifacts import Artifact, list_artifacts
from contracts.errors import ArtifactMissing
from contracts.store import Store

KIND = "runtime"
ARCHIVE, ROOT = "packages.tar", "root.tar"


def find_runtime(store: Store, digest: str) -> Artifact | None:
    """Artifact of a runtime, or None. digest: SHA-256 of its tar."""
    return next((each for each in list_artifacts(store, KIND) if each.meta.get("digest") == digest), None)


def runtime_archive(store: Store | None, digest: str) -> Path:
    """Verified local tar of a runtime. digest: SHA-256 of the tar. Raises ArtifactMissing."""
    found = None if store is None else find_runtime(store, digest)
    if found is not None:
        return found.path(ROOT if ROOT in found.names() else ARCHIVE)
    where = "no store was given" if store is None else f"store {store.url} has no such artifact"
    raise ArtifactMissing(
        f"runtime {digest[:12]} of the task's environment is missing ({where}): make it again, or point TRIPLANE_STORE"
        " at the store that has it"
    )
