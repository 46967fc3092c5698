"""A task suite by its digest."""

from __future__ import annotations

from contracts.artifacts import Artifact, list_artifacts
from contracts.errors import ArtifactMissing
from contracts.store import Store


def find_suite(store: Store, digest: str) -> Artifact:
    """The task suite whose content digest is, or begins with, `digest`. Raises ArtifactMissing for none or several."""
    found = {
        suite.ref.digest: suite for suite in list_artifacts(store, "task_suite") if suite.ref.digest.startswith(digest)
    }
    if len(found) != 1:
        raise ArtifactMissing(
            f"{digest!r} begins the digests of {len(found)} task suites in {store.url}: give one that `triplane tasks build` or "
            "`triplane tasks import` printed"
        )
    return next(iter(found.values()))
