"""Small artifacts that follow from others and enter an action key by their content alone."""

from __future__ import annotations

from typing import Any

from contracts.artifacts import SCHEMA_VERSION, ArtifactRef, ArtifactWriter, FileEntry, artifact_exists, content_digest
from contracts.digests import canonical_json, digest_of, sha256
from contracts.store import Store


def derived_ref(kind: str, file: str, value: Any) -> ArtifactRef:
    """The artifact of this kind whose only file is `value` as JSON. `commit_derived` makes it."""
    body = canonical_json(value)
    entry = FileEntry(path=file, size=len(body), sha256=sha256(body), digest=sha256(body))
    return ArtifactRef(kind=kind, key=digest_of([kind, value]), digest=content_digest(kind, SCHEMA_VERSION, [entry]))


def commit_derived(store: Store, kind: str, file: str, value: Any) -> None:
    """Make the artifact of `derived_ref`, unless it exists."""
    ref = derived_ref(kind, file, value)
    if not artifact_exists(store, ref.kind, ref.key):
        with ArtifactWriter(store, ref.kind, ref.key, parents={}, config={}, code_version="1") as out:
            out.add_json(file, value)
            out.commit()
