"""Order in which supervised training reads its rows: seeded epochs of one source, or a mixture of several.

Every batch is a function of the seed and of the rows drawn so far, which a snapshot holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from trainer.data import permutation


@dataclass(frozen=True)
class Source:
    """Rows of one artifact of demonstrations."""

    first: int
    """Its first row among all."""
    count: int
    """Its rows."""
    weight: float
    """Share of the drawn rows, up to a common factor."""


class Order:
    """Batches of row numbers.

    With one source and `batch_size`, an epoch is cut into whole batches and a shorter last part is left out. Otherwise
    rows follow each other without a gap between epochs. Of several sources, each row is drawn from the one that is
    furthest behind its share of the rows so far: each source stays within about one row of its share, with dozens of
    sources within two. Weights that are whole numbers and add up to the rows drawn are the sources' counts at the end,
    for a source that has its count is never behind.
    """

    def __init__(
        self, sources: Sequence[Source], lengths: np.ndarray, batch_size: int, batch_tokens: int | None, seed: int
    ) -> None:
        """lengths: int64, tokens of each row. batch_tokens: rows are drawn until the next would exceed it, but at least
        one; None: batches have `batch_size` rows.
        """
        self._sources, self._lengths, self._seed = list(sources), lengths, seed
        self._size, self._tokens = batch_size, batch_tokens
        self._shares = np.array([source.weight for source in sources]) / sum(source.weight for source in sources)
        self.drawn = [0] * len(self._sources)
        """Rows drawn of each source, epochs included. Set it to continue."""
        self._epochs = [(-1, np.zeros(0, np.int64)) for _ in self._sources]
        """Number and order of each source's present epoch."""

    def next(self) -> list[int]:
        """Rows of the next batch."""
        if len(self._sources) == 1 and self._tokens is None:
            return self._whole()
        rows: list[int] = []
        room = self._tokens
        while room is not None or len(rows) < self._size:
            number = int(np.argmax(self._shares * (sum(self.drawn) + 1) - np.array(self.drawn)))
            row = self._row(number)
            if room is not None:
                room -= int(self._lengths[row])
                if rows and room < 0:
                    break
            self.drawn[number] += 1
            rows.append(row)
        return rows

    def _whole(self) -> list[int]:
        """The next batch of the only source."""
        source = self._sources[0]
        size = min(self._size, source.count)
        step = self.drawn[0] // size
        self.drawn[0] += size
        return [source.first + row for row in batch_members(source.count, size, self._seed, step)]

    def _row(self, number: int) -> int:
        """The next row of a source."""
        source = self._sources[number]
        epoch, place = divmod(self.drawn[number], source.count)
        if self._epochs[number][0] != epoch:
            self._epochs[number] = epoch, permutation(source.count, self._seed, epoch, number)
        return source.first + int(self._epochs[number][1][place])


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to `weights` whose sum is `total`, by the largest remainder; of equal remainders the
    earlier counts.
    """
    exact = [Fraction(weight) for weight in weights]
    quotas = [total * weight / sum(exact) for weight in exact]
    found = [int(quota) for quota in quotas]
    order = sorted(range(len(quotas)), key=lambda number: (found[number] - quotas[number], number))
    for number in order[: total - sum(found)]:
        found[number] += 1
    return found


def batch_members(count: int, batch_size: int, seed: int, step: int) -> list[int]:
    """Rows of the batch at `step` (from 0): consecutive parts of one permutation per epoch, without a shorter last
    part.
    """
    size = min(batch_size, count)
    per_epoch = count // size
    epoch, cut = divmod(step, per_epoch)
    found: list[int] = permutation(count, seed, epoch)[cut * size : (cut + 1) * size].tolist()
    return found
