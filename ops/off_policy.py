"""Distance between the policy that sampled and the weights that training starts from, in trainings."""

from __future__ import annotations

from collections.abc import Iterator

from contracts.artifacts import ArtifactRef, open_artifact
from contracts.store import Store
from resources.errors import IterationRefused

FAR = 100
"""Trainings to look back for a common ancestor."""


def ancestors(store: Store, checkpoint: ArtifactRef) -> Iterator[ArtifactRef]:
    """The checkpoint, the one that it was trained from, and so on. Raises ArtifactMissing for a deleted one."""
    current: ArtifactRef | None = checkpoint
    while current is not None:
        yield current
        current = open_artifact(store, current).manifest.parents.get("checkpoint")


def trainings_between(store: Store, one: ArtifactRef, other: ArtifactRef, at_most: int) -> int | None:
    """Number of trainings from one checkpoint up to their nearest common ancestor and down to the other.

    Returns None if it exceeds `at_most`, or if they have no common ancestor.
    """
    if one.digest == other.digest:
        return 0
    lines = [list(_first(ancestors(store, each), at_most + 1)) for each in (one, other)]
    found = [up + lines[1].index(digest) for up, digest in enumerate(lines[0]) if digest in lines[1]]
    return min(found) if found and min(found) <= at_most else None


def require_recent(store: Store, experiment: str, policy: ArtifactRef, start: ArtifactRef, at_most: int) -> int:
    """Staleness of what `policy` sampled for a training that starts from `start`. Raises IterationRefused if it exceeds
    `at_most`, before anything is computed.
    """
    found = trainings_between(store, policy, start, at_most)
    if found is None:
        far = trainings_between(store, policy, start, FAR)
        raise IterationRefused(
            f"{experiment}: policy {policy.short} sampled, training would start from {start.short},"
            f" {far or f'more than {FAR}'} trainings away, at most {at_most} (off_policy.max_staleness): raise that"
            f" limit, or sample with a newer policy"
        )
    return found


def staleness(store: Store, policy: ArtifactRef, start: ArtifactRef) -> int:
    """Trainings between the policy that sampled and the start of the training; -1: it has another base."""
    found = trainings_between(store, policy, start, FAR)
    return -1 if found is None else found


def _first(refs: Iterator[ArtifactRef], count: int) -> Iterator[str]:
    for _, ref in zip(range(count), refs, strict=False):
        yield ref.digest
