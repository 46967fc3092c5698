"""Runtimes in a store: artifacts of the kind `runtime`, by the digest that tasks name.

A runtime is packages (packages.tar, files only) or a whole root file system (root.tar, which begins with its root).
"""

from __future__ import annotations

from pathlib import Path

from contracts.artifacts import list_artifacts
from contracts.errors import ArtifactMissing
from contracts.store import Store

KIND = "runtime"
ARCHIVE, ROOT = "packages.tar", "root.tar"


def runtime_archive(store: Store | None, digest: str) -> Path:
    """Verified local tar of a runtime. digest: SHA-256 of the tar. Raises ArtifactMissing."""
    for artifact in () if store is None else list_artifacts(store, KIND):
        if artifact.manifest.meta.get("digest") == digest:
            return artifact.path(ROOT if ROOT in artifact.names() else ARCHIVE)
    where = "no store was given" if store is None else f"store {store.url} has no such artifact"
    raise ArtifactMissing(
        f"runtime {digest[:12]} of the task's environment is missing ({where}): make it again, or point TRIPLANE_STORE"
        " at the store that has it"
    )
