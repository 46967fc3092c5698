"""Quarantined episodes of one dataset, as an artifact that enters its action key."""

from __future__ import annotations

from collections.abc import Iterable

from contracts.artifacts import SCHEMA_VERSION, ArtifactRef, ArtifactWriter, FileEntry, artifact_exists, content_digest
from contracts.digests import canonical_json, digest_of, sha256
from contracts.store import Store

QUARANTINED = "quarantined"
"""Kind of the artifact, and its role among the parents of a dataset."""
_FILE = "episodes.json"


def quarantined_ref(ids: Iterable[str]) -> dict[str, ArtifactRef]:
    """The artifact with these ids of episodes, by role; empty if there are none. `commit_quarantined` makes it.

    It depends on the episodes alone, not on the marks that name them: lifting a mark restores the earlier key.
    """
    listed = sorted(ids)
    if not listed:
        return {}
    body = canonical_json(listed)
    entry = FileEntry(path=_FILE, size=len(body), sha256=sha256(body), digest=sha256(body))
    digest = content_digest(QUARANTINED, SCHEMA_VERSION, [entry])
    return {QUARANTINED: ArtifactRef(kind=QUARANTINED, key=digest_of([QUARANTINED, listed]), digest=digest)}


def commit_quarantined(store: Store, ids: Iterable[str]) -> None:
    """Make the artifact of `quarantined_ref`, if there are ids."""
    for ref in quarantined_ref(ids).values():
        if not artifact_exists(store, ref.kind, ref.key):
            with ArtifactWriter(store, ref.kind, ref.key, parents={}, config={}, code_version="1") as out:
                out.add_json(_FILE, sorted(ids))
                out.commit()
