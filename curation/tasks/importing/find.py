"""Find a task suite by its digest."""

from __future__ import annotations

from contracts.artifacts import Artifact, list_artifacts
from contracts.errors import ArtifactMissing
from contracts.store import Store


def suites_of(store: Store, digest: str) -> list[Artifact]:
    """Task suites whose content digest starts with `digest`, without duplicates."""
    suites = list_artifacts(store, "task_suite")
    return list({suite.ref.digest: suite for suite in suites if suite.ref.digest.startswith(digest)}.values())


def find_suite(store: Store, digest: str) -> Artifact:
    """The task suite of this digest. Raises ArtifactMissing for none or several."""
    found = suites_of(store, digest)
    if len(found) != 1:
        raise ArtifactMissing(
            f"{digest!r} matches {len(found)} task suites in {store.url}, expected one: give a digest that"
            " `triplane tasks build` or `triplane tasks import` printed"
        )
    return found[0]
