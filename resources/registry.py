"""Which policy is live. Materialized is not live: only this says what may be used."""

from __future__ import annotations

from contracts.artifacts import ArtifactRef, Frozen
from contracts.pointers import Pointer, PointerEntry
from contracts.store import Store


class LivePolicy(Frozen):
    """One policy that is, or was, live."""

    number: int
    """Position in the history, from 1."""
    policy: ArtifactRef
    """Its checkpoint."""
    trainer_state: ArtifactRef
    """What training goes on from."""
    parent: str
    """Digest of the policy it replaced."""
    iteration: str
    """Partition key of the iteration that made it."""


class Registry:
    """The live policy of one experiment, with its history. Every change is a compare-and-swap."""

    def __init__(self, store: Store, experiment: str) -> None:
        self.experiment = experiment
        self._pointer = Pointer(store, f"live/{experiment}")

    def live(self) -> LivePolicy | None:
        """The live policy, or None while nothing was promoted (then the base policy acts)."""
        entry = self._pointer.current()
        return _policy(entry) if entry else None

    def history(self) -> list[LivePolicy]:
        """Every policy that ever went live, oldest first."""
        return [_policy(entry) for entry in self._pointer.history()]

    def find(self, digest: str) -> LivePolicy | None:
        """The entry at which the policy of this digest went live, or None."""
        return next((entry for entry in reversed(self.history()) if entry.policy.digest == digest), None)

    def promote(
        self, candidate: ArtifactRef, trainer_state: ArtifactRef, *, parent: str, iteration: str
    ) -> LivePolicy | None:
        """Make `candidate` live if its parent (a digest) still is. None when another policy is live by now: nothing changed.

        While nothing was promoted yet the base policy counts as live, so any parent is accepted.
        """
        live = self.live()
        if live is not None and live.policy.digest != parent:
            return None
        number = live.number if live else 0
        entry = LivePolicy(
            number=number + 1, policy=candidate, trainer_state=trainer_state, parent=parent, iteration=iteration
        )
        advanced = self._pointer.advance(entry.model_dump(mode="json", exclude={"number"}), number)
        return entry if advanced else None


def _policy(entry: PointerEntry) -> LivePolicy:
    return LivePolicy(number=entry.number, **entry.value)
