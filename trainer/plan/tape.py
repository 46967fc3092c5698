"""Record of planned allocations and releases, in order, from which peaks follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

HOST = frozenset(
    (
        "checkpoint as read",
        "loaded checkpoint",
        "trainer state as read",
        "drawn weights",
        "data",
        "gathered to be written",
    )
)
"""Kinds that a job on a GPU keeps in the host's memory."""


@dataclass(frozen=True)
class Plan:
    """Memory of one rank of a training job, in bytes."""

    moments: Mapping[str, Mapping[str, int]]
    """For each moment (load, score, backward, step, publish), in order: bytes of each kind at its peak."""
    ranks: int
    """Ranks with this much each."""

    @property
    def moment(self) -> str:
        """Moment of the largest peak."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def at_peak(self) -> Mapping[str, int]:
        """Bytes of each kind at the largest peak."""
        return self.moments[self.moment]

    @property
    def peak(self) -> int:
        """The largest sum of bytes that are held at once."""
        return sum(self.at_peak.values())

    @property
    def biggest(self) -> list[tuple[str, int]]:
        """(kind, bytes) at the peak, largest first."""
        return sorted(self.at_peak.items(), key=lambda item: -item[1])


class Tape:
    """Bytes held now, and the composition of each moment's peak so far."""

    def __init__(self, *, cuda: bool = False) -> None:
        """cuda: count a GPU's memory alone, not what lies in its host's."""
        self._elsewhere = HOST if cuda else frozenset[str]()
        self._held: Counter[str] = Counter()
        self._peaks: dict[str, dict[str, int]] = {}
        self._moment = ""

    def enter(self, moment: str) -> None:
        """Begin `moment`; what is held stays."""
        self._moment = moment
        self._peaks.setdefault(moment, {})
        self._look()

    def hold(self, kind: str, size: float) -> None:
        """Allocate `size` bytes of `kind`."""
        if kind not in self._elsewhere:
            self._held[kind] += int(size)
            self._look()

    def drop(self, kind: str, size: float | None = None) -> None:
        """Release `size` bytes of `kind`, by default all."""
        if kind not in self._elsewhere:
            self._held[kind] -= self._held[kind] if size is None else int(size)

    @contextmanager
    def brief(self, kind: str, size: float) -> Iterator[None]:
        """Hold `size` bytes of `kind` for a block."""
        self.hold(kind, size)
        yield
        self.drop(kind, size)

    def touch(self, kind: str, size: float) -> None:
        """Allocate `size` bytes and release them at once."""
        with self.brief(kind, size):
            pass

    def plan(self, ranks: int) -> Plan:
        """Peaks of all moments."""
        return Plan({name: dict(found) for name, found in self._peaks.items()}, ranks)

    def _look(self) -> None:
        if sum(self._held.values()) > sum(self._peaks[self._moment].values()):
            self._peaks[self._moment] = {kind: size for kind, size in self._held.items() if size}
