"""Supports of a token sequence: the sets of tokens that its tokens were drawn from.

Sampling under a grammar or with `top_p` draws a token from part of the vocabulary, with the policy's probabilities
renormalized over that part, the support. The gradient of expected reward then is that of the log probability over the
support: with that over the whole vocabulary it is biased. So the sampler records each support as it drew from it, and
the trainer normalizes over the same set.

A record keeps each distinct set once, as the ids of its members or of the tokens that it leaves out, whichever are
fewer: a few bytes for the names in a tool call, some kilobytes for the text in one.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from contracts.errors import SchemaError

Mask = npt.NDArray[np.bool_]
WHOLE = -1
"""Index that stands for the whole vocabulary."""


@dataclass(frozen=True, eq=False)
class Supports:
    """Support of each token of a sequence or completion."""

    numbers: npt.NDArray[np.int32]
    """[tokens]: index into the sets, or WHOLE, as for tokens that were not sampled."""
    sizes: npt.NDArray[np.int32]
    """[sets]: number of each set's `ids`."""
    left_out: npt.NDArray[np.bool_]
    """[sets]: whether a set's `ids` are those that it leaves out, instead of its members."""
    ids: npt.NDArray[np.int32]
    """Token ids of all sets end to end, ascending in each."""

    def masks(self, places: npt.NDArray[np.integer], vocabulary: int) -> Mask:
        """bool [places, vocabulary]: whether a token is in the support, for the tokens at `places`."""
        found = np.ones((len(places), vocabulary), np.bool_)
        numbers = self.numbers[places]
        for number in np.unique(numbers[numbers != WHOLE]):
            own = np.full(vocabulary, self.left_out[number])
            own[self.ids_of(number)] = not self.left_out[number]
            found[numbers == number] = own
        return found

    def ids_of(self, number: int) -> npt.NDArray[np.int32]:
        """`ids` of the set with this index."""
        end = int(self.sizes[: number + 1].sum())
        return self.ids[end - int(self.sizes[number]) : end]

    def between(self, first: int, last: int) -> Supports:
        """The record of the tokens [first, last) alone."""
        writer = SupportsWriter()
        writer.extend(replace(self, numbers=self.numbers[first:last]))
        return writer.supports()

    def fault(self, token_ids: npt.NDArray[np.integer], vocabulary: int) -> str | None:
        """Why this is no record of these tokens of a vocabulary, or None."""
        if len(self.numbers) != len(token_ids):
            return f"covers {len(self.numbers)} of {len(token_ids)} tokens"
        if len(self.ids) and not 0 <= int(self.ids.min()) <= int(self.ids.max()) < vocabulary:
            return f"names a token outside 0..{vocabulary - 1}"
        for number in np.unique(self.numbers[self.numbers != WHOLE]):
            places = np.flatnonzero(self.numbers == number)
            lost = places[np.isin(token_ids[places], self.ids_of(number)) == self.left_out[number]]
            if len(lost):
                return f"leaves out the token at {lost[0]}, {token_ids[lost[0]]}, which was drawn from it"
        return None


class SupportsWriter:
    """Collects the supports of tokens in order."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._known: dict[tuple[bool, bytes], int] = {}

    def __len__(self) -> int:
        """Number of tokens so far."""
        return len(self._numbers)

    def add(self, mask: Mask | None, count: int = 1) -> None:
        """`count` tokens with this support [vocabulary]; None: the whole vocabulary."""
        members = 0 if mask is None else np.count_nonzero(mask)
        if mask is None or members == len(mask):
            self._numbers += [WHOLE] * count
            return
        left_out = bool(2 * members > len(mask))
        self._numbers += [self._index(left_out, np.flatnonzero(mask != left_out).astype(np.int32))] * count

    def add_members(self, ids: Sequence[int], vocabulary: int) -> None:
        """One token whose support has these members. Raises SchemaError for ids outside the vocabulary."""
        members = np.unique(np.array(ids, np.int64))
        if len(members) and not 0 <= members[0] <= members[-1] < vocabulary:
            raise SchemaError(f"names a token outside 0..{vocabulary - 1}")
        mask = np.zeros(vocabulary, np.bool_)
        mask[members] = True
        self.add(mask)

    def extend(self, supports: Supports) -> None:
        """The tokens of another record."""
        used, first = np.unique(supports.numbers, return_index=True)
        own = {  # in order of their first token, so that the same tokens give the same bytes
            each: self._index(bool(supports.left_out[each]), supports.ids_of(each))
            for each in used[np.argsort(first)].tolist()
            if each != WHOLE
        }
        self._numbers += [own.get(number, WHOLE) for number in supports.numbers.tolist()]

    def supports(self) -> Supports:
        """The record so far."""
        sets = [np.frombuffer(data, np.int32) for _, data in self._known]
        return Supports(
            np.array(self._numbers, np.int32),
            np.array([len(each) for each in sets], np.int32),
            np.array([left_out for left_out, _ in self._known], np.bool_),
            np.concatenate([np.zeros(0, np.int32), *sets]),
        )

    def _index(self, left_out: bool, ids: npt.NDArray[np.int32]) -> int:
        return self._known.setdefault((left_out, ids.tobytes()), len(self._known))


def supports_of(masks: Iterable[Mask | None]) -> Supports:
    """The supports of tokens, given one by one; None: the whole vocabulary."""
    writer = SupportsWriter()
    for mask in masks:
        writer.add(mask)
    return writer.supports()


def encode_supports(supports: Supports) -> bytes:
    """Content of the column `supports`: four NumPy arrays (`.npy`, format 1.0), one after the other."""
    out = io.BytesIO()
    for array in (supports.numbers, supports.sizes, supports.left_out, supports.ids):
        np.lib.format.write_array(out, array, version=(1, 0), allow_pickle=False)
    return out.getvalue()


def decode_supports(data: bytes) -> Supports:
    """Inverse of `encode_supports`. Raises SchemaError for anything else."""
    source = io.BytesIO(data)
    try:
        arrays = [np.lib.format.read_array(source, allow_pickle=False) for _ in range(4)]
    except (ValueError, EOFError, OSError) as error:
        raise SchemaError(f"supports are not four NumPy arrays ({error}): record them again") from None
    kinds = [str(each.dtype) for each in arrays]
    if kinds != ["int32", "int32", "bool", "int32"] or any(each.ndim != 1 for each in arrays):
        raise SchemaError(f"supports are arrays of {', '.join(kinds)}: record them again")
    numbers, sizes, left_out, ids = arrays
    if not _consistent(numbers, sizes, left_out, ids):
        raise SchemaError("supports name sets that their record does not have: record them again")
    return Supports(numbers, sizes, left_out, ids)


def _consistent(
    numbers: npt.NDArray[np.int32],
    sizes: npt.NDArray[np.int32],
    left_out: npt.NDArray[np.bool_],
    ids: npt.NDArray[np.int32],
) -> bool:
    return (
        len(sizes) == len(left_out)
        and int(sizes.min(initial=0)) >= 0
        and int(sizes.sum(dtype=np.int64)) == len(ids)
        and int(numbers.min(initial=0)) >= WHOLE
        and int(numbers.max(initial=WHOLE)) < len(sizes)
    )
