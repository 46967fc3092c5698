"""Quarantined episodes of one dataset, as an artifact that enters its action key."""

from __future__ import annotations

from collections.abc import Iterable

from contracts.artifacts import ArtifactRef
from contracts.store import Store
from ops.derived import commit_derived, derived_ref

QUARANTINED = "quarantined"
"""Kind of the artifact, and its role among the parents of a dataset."""
_FILE = "episodes.json"


def quarantined_ref(ids: Iterable[str]) -> dict[str, ArtifactRef]:
    """The artifact with these ids of episodes, by role; empty if there are none. `commit_quarantined` makes it.

    It depends on the episodes alone, not on the marks that name them: lifting a mark restores the earlier key.
    """
    listed = sorted(ids)
    return {QUARANTINED: derived_ref(QUARANTINED, _FILE, listed)} if listed else {}


def commit_quarantined(store: Store, ids: Iterable[str]) -> None:
    """Make the artifact of `quarantined_ref`, if there are ids."""
    listed = sorted(ids)
    if listed:
        commit_derived(store, QUARANTINED, _FILE, listed)
