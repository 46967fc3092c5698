"""Token sequences as packed batches.

Parquet --RowsReader, batch by batch--> flat arrays --Rows, row by row--> ScoredSequence --make_batch--> Batch
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from torch import Tensor

from contracts.episodes import TokenRole
from contracts.routing import Routes
from contracts.supports import Supports, SupportsWriter, decode_supports
from trainer.errors import TrainingDataError
from trainer.flat import flat_array
from trainer.head import SupportSets
from trainer.model import Batch
from trainer.truncation import Truncation, keep_tokens


@dataclass(frozen=True)
class ScoredSequence:
    """One sequence with the positions that a loss uses."""

    token_ids: np.ndarray
    """int64 [length]."""
    scored: np.ndarray
    """int64, ascending: positions of the policy's tokens. Never 0, since no earlier token predicts it."""
    routes: Routes | None = None
    """Experts to replay; see `contracts.routing`."""
    supports: Supports | None = None
    """Sets that the tokens were drawn from; see `contracts.supports`. None: the whole vocabulary."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    @property
    def first_turn(self) -> int:
        """Number of `scored` positions in the first contiguous run."""
        breaks = np.flatnonzero(np.diff(self.scored) != 1)
        return int(breaks[0]) + 1 if len(breaks) else len(self.scored)


class RouteRows:
    """Routing of each of many sequences, in one flat array."""

    def __init__(self, flat: np.ndarray, recorded: np.ndarray, shape: tuple[int, int]) -> None:
        """flat: the records end to end. recorded: int64 [rows], positions of each. shape: (layers, experts per
        token).
        """
        self._flat, self._recorded, self._shape = flat, recorded, shape
        self._starts = (np.cumsum(recorded) - recorded) * (shape[0] * shape[1])

    def __getitem__(self, row: int) -> Routes:
        start, count = self._starts[row], self._recorded[row]
        size = count * self._shape[0] * self._shape[1]
        found: Routes = self._flat[start : start + size].reshape(count, *self._shape)
        return found


class SupportRows:
    """Supports of each of many sequences, encoded, in one flat array."""

    def __init__(self, flat: np.ndarray, sizes: np.ndarray) -> None:
        """flat: uint8, valid records end to end. sizes: int64 [rows], bytes of each; 0 for a row without."""
        self._flat, self._sizes, self._ends = flat, sizes, np.cumsum(sizes)

    def __getitem__(self, row: int) -> Supports | None:
        end, size = self._ends[row], self._sizes[row]
        return decode_supports(self._flat[end - size : end].tobytes()) if size else None


class Rows(Sequence[ScoredSequence]):
    """Sequences in flat arrays; a row is cut out when it is asked for."""

    routes: RouteRows | None = None
    """Experts to replay."""
    supports: SupportRows | None = None
    """Sets that the tokens were drawn from."""

    def __init__(
        self,
        token_ids: np.ndarray,
        policy: np.ndarray,
        lengths: np.ndarray,
        scored: np.ndarray,
        origins: np.ndarray,
        sources: Sequence[tuple[str, int]],
    ) -> None:
        """token_ids: int32, and policy: bool, whether a loss uses the token, of all rows end to end. lengths and
        scored: int64 [rows], tokens and used tokens of each. origins: int64 [rows], row number in its table. sources:
        name and first row of each table.
        """
        self._token_ids, self._policy = token_ids, policy
        self.lengths, self.scored = lengths, scored
        self._origins, self._sources = origins, list(sources)
        self._starts = np.concatenate([[0], np.cumsum(lengths)])

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, row: int) -> ScoredSequence: ...
    @overload
    def __getitem__(self, row: slice) -> list[ScoredSequence]: ...
    def __getitem__(self, row: int | slice) -> ScoredSequence | list[ScoredSequence]:
        if isinstance(row, slice):
            return [self[each] for each in range(*row.indices(len(self)))]
        start, end = self._starts[row], self._starts[row] + self.lengths[row]
        return ScoredSequence(
            self._token_ids[start:end].astype(np.int64),
            np.flatnonzero(self._policy[start:end]),
            None if self.routes is None else self.routes[row],
            None if self.supports is None else self.supports[row],
        )

    def place(self, row: int) -> str:
        """Table and row number in it, for errors."""
        what = [what for what, first in self._sources if first <= row][-1]
        return f"row {self._origins[row]} of {what}"


class Parts(Sequence[list[ScoredSequence]]):
    """Microbatches, each read when it is asked for."""

    def __init__(self, sequences: Sequence[ScoredSequence], parts: Sequence[Sequence[int]]) -> None:
        """parts: rows of each microbatch."""
        self._sequences, self._parts = sequences, parts

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, number: int) -> list[ScoredSequence]: ...
    @overload
    def __getitem__(self, number: slice) -> list[list[ScoredSequence]]: ...
    def __getitem__(self, number: int | slice) -> list[ScoredSequence] | list[list[ScoredSequence]]:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        return [self._sequences[row] for row in self._parts[number]]


class RowsReader:
    """Collects and checks sequences, batch by batch, of one table or of several."""

    def __init__(
        self,
        what: str,
        vocabulary: int,
        longest: int,
        tokens: int,
        folder: Path | None = None,
        truncation: Truncation = "error",
        roles: Sequence[TokenRole] | None = None,
    ) -> None:
        """what: name of the table in errors. longest: tokens that the model accepts. tokens: of all rows, at most.
        folder: see `flat_array`. truncation: rule for longer rows. roles: of the tokens that a loss uses, without the
        first one of a row; None: the policy's, all of which a sampler predicted, so that none is the first.
        """
        self._vocabulary, self._longest, self._truncation, self._roles = vocabulary, longest, truncation, roles
        self._token_ids = flat_array(tokens, np.int32, folder)
        self._policy = flat_array(tokens, np.bool_, folder)
        self._lengths: list[np.ndarray] = []
        self._scored: list[np.ndarray] = []
        self._origins: list[np.ndarray] = []
        self._sources: list[tuple[str, int]] = []
        self.rows = self.tokens = self.truncated = self.dropped = 0
        """Rows and tokens so far; rows that were shortened, and that were left out."""
        self.begin(what)

    def begin(self, what: str) -> None:
        """The next rows are those of another table."""
        self._what, self.seen = what, 0
        self._sources.append((what, self.rows))

    def add(self, batch: pa.RecordBatch) -> np.ndarray:
        """Append rows with `token_ids` and `token_role`.

        Returns bool [tokens of the batch]: whether the policy made the token. Raises TrainingDataError with the row
        number.
        """
        token_ids, lengths = _flattened(batch.column("token_ids"))
        roles, role_counts = _flattened(batch.column("token_role"))
        self._require_whole(lengths, role_counts)
        self._require_roles(roles, lengths)
        policy, starts = np.isin(roles, self._roles or [TokenRole.POLICY]), np.cumsum(lengths) - lengths
        if self._roles is not None:
            policy[starts] = False  # no token predicts the first one
        keep = self._kept(roles, policy, lengths, starts)
        foreign = (token_ids >= self._vocabulary) | (token_ids < 0)
        if len(starts):
            scored = np.add.reduceat(policy & keep, starts, dtype=np.int64)
            kept = np.add.reduceat(keep, starts, dtype=np.int64)
            self._require_usable(np.logical_or.reduceat(foreign, starts), kept, scored, policy[starts] & keep[starts])
            self._append(token_ids[keep], policy[keep], kept, scored)
        self.seen += len(lengths)
        return policy

    def _kept(self, roles: np.ndarray, policy: np.ndarray, lengths: np.ndarray, starts: np.ndarray) -> np.ndarray:
        """bool [tokens]: which ones the rule keeps. Rows that lose all tokens to train on are left out."""
        keep = np.ones(len(roles), np.bool_)
        if self._truncation == "error":
            return keep
        for row in np.flatnonzero(lengths > self._longest):
            start, end = starts[row], starts[row] + lengths[row]
            own = keep_tokens(roles[start:end], self._longest, self._truncation)
            first = int(np.argmax(own))
            policy[start + first] = False  # no token predicts the first one
            usable = bool((own & policy[start:end]).any())
            keep[start:end] = own & usable
            self.truncated, self.dropped = self.truncated + usable, self.dropped + (not usable)
        return keep

    def _append(self, token_ids: np.ndarray, policy: np.ndarray, lengths: np.ndarray, scored: np.ndarray) -> None:
        """Append rows; those of length 0 are left out."""
        end, rows = self.tokens + len(token_ids), np.flatnonzero(lengths)
        self._token_ids[self.tokens : end], self._policy[self.tokens : end] = token_ids, policy
        self._lengths.append(lengths[rows])
        self._scored.append(scored[rows])
        self._origins.append(self.seen + rows)
        self.rows, self.tokens = self.rows + len(rows), end

    def finish(self) -> Rows:
        """All rows."""
        nothing = np.zeros(0, np.int64)
        columns = (self._lengths, self._scored, self._origins)
        lengths, scored, origins = (np.concatenate([nothing, *each]) for each in columns)
        return Rows(self._token_ids, self._policy, lengths, scored, origins, self._sources)

    def _require_whole(self, lengths: np.ndarray, role_counts: np.ndarray) -> None:
        bad = np.flatnonzero((lengths != role_counts) | (lengths == 0))
        if len(bad):
            tokens, roles = lengths[bad[0]], role_counts[bad[0]]
            raise self._error(bad[0], f"has {tokens} tokens and {roles} roles: build the table again")

    def _require_roles(self, roles: np.ndarray, lengths: np.ndarray) -> None:
        bad = np.flatnonzero((roles < 0) | (roles > max(TokenRole)))  # -1: null
        if len(bad):
            row, role = int(np.searchsorted(np.cumsum(lengths), bad[0], "right")), roles[bad[0]]
            names = ", ".join(f"{each.value} {each.name.lower()}" for each in TokenRole)
            raise self._error(row, f"has a token of the role {'null' if role < 0 else role}: use one of {names}")

    def _require_usable(
        self, foreign: np.ndarray, lengths: np.ndarray, scored: np.ndarray, first_scored: np.ndarray
    ) -> None:
        unscored = ((scored == 0) & (lengths > 0)) | first_scored
        bad = np.flatnonzero(foreign | (lengths > self._longest) | unscored)
        if not len(bad):
            return
        row = bad[0]
        if foreign[row]:
            raise self._error(
                row,
                f"has a token id outside 0..{self._vocabulary - 1}: the table was made with another tokenizer; build it"
                " again",
            )
        if lengths[row] > self._longest:
            raise self._error(
                row, f"has {lengths[row]} tokens, the model accepts {self._longest}: raise model.max_positions"
            )
        if first_scored[row]:
            raise self._error(
                row, "begins with a token of the role POLICY, which nothing predicts: begin it with its prompt"
            )
        raise self._error(row, "has no policy token after its first position: leave the row out")

    def _error(self, row: int, fault: str) -> TrainingDataError:
        """Error for a row of the batch that is being added."""
        return TrainingDataError(f"{self._what} row {self.seen + row} {fault}")


def _flattened(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of a column of lists end to end, with -1 for nulls, and int64 [rows], the length of each list."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = column.flatten()
    if values.null_count:
        values = pc.fill_null(values.cast(pa.int64()), -1)
    return values.to_numpy(zero_copy_only=False), lengths


def read_sequences(table: pa.Table, what: str, vocabulary: int, longest: int) -> Rows:
    """Sequences from rows with `token_ids` and `token_role`. Raises TrainingDataError with `what` and the row
    number.
    """
    tokens = sum(len(chunk.flatten()) for chunk in table.column("token_ids").chunks)
    reader = RowsReader(what, vocabulary, longest, tokens)
    for batch in table.to_batches():
        reader.add(batch)
    return reader.finish()


def count_tokens(path: Path) -> int:
    """Entries of `token_ids` in a Parquet file, from its footer; an empty or null list counts as one."""
    footer = pq.read_metadata(path)
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    return sum(each.num_values for each in columns if each.path_in_schema.split(".")[0] == "token_ids")


def lengths_of(sequences: Sequence[ScoredSequence]) -> np.ndarray:
    """int64 [rows]: tokens of each sequence."""
    if isinstance(sequences, Rows):
        return sequences.lengths
    return np.asarray([sequence.length for sequence in sequences], np.int64)


def scored_of(sequences: Sequence[ScoredSequence]) -> np.ndarray:
    """int64 [rows]: policy tokens of each sequence."""
    if isinstance(sequences, Rows):
        return sequences.scored
    return np.asarray([len(sequence.scored) for sequence in sequences], np.int64)


def make_batch(sequences: Sequence[ScoredSequence]) -> Batch:
    """Pack sequences end to end."""
    lengths = [sequence.length for sequence in sequences]
    starts = np.cumsum([0, *lengths[:-1]])
    scored = [len(sequence.scored) for sequence in sequences]
    return Batch(
        token_ids=_tensor([sequence.token_ids for sequence in sequences]),
        rows=_tensor([start + sequence.scored - 1 for start, sequence in zip(starts, sequences, strict=True)]),
        targets=_tensor([sequence.token_ids[sequence.scored] for sequence in sequences]),
        owners=torch.from_numpy(np.repeat(np.arange(len(sequences)), scored)),
        lengths=lengths,
        routed=_routed(sequences),
        supports=_supports(sequences),
    )


def _routed(sequences: Sequence[ScoredSequence]) -> Tensor | None:
    """`Batch.routed`; None if no sequence has routes."""
    known = next((each.routes for each in sequences if each.routes is not None), None)
    if known is None:
        return None
    starts = np.cumsum([0, *(each.length for each in sequences)])
    filled = np.full((starts[-1], *known.shape[1:]), -1, np.int32)
    for start, each in zip(starts[:-1], sequences, strict=True):
        if each.routes is not None:
            filled[start : start + len(each.routes)] = each.routes
    return torch.from_numpy(filled)


def _supports(sequences: Sequence[ScoredSequence]) -> SupportSets | None:
    """`Batch.supports`, each distinct set once; None if all scored tokens were drawn from the whole vocabulary."""
    if all(each.supports is None for each in sequences):
        return None
    writer = SupportsWriter()
    for each in sequences:
        if each.supports is None:
            writer.add(None, len(each.scored))
        else:
            writer.extend(replace(each.supports, numbers=each.supports.numbers[each.scored]))
    found = writer.supports()
    return SupportSets.of(found) if len(found.sizes) else None


def cut_by_tokens(sequences: Sequence[ScoredSequence], tokens: int) -> list[list[int]]:
    """Indices of `sequences`, in order, in microbatches of at most `tokens`, but at least one sequence."""
    return cut_by_lengths(lengths_of(sequences), tokens)


def cut_by_lengths(lengths: np.ndarray, tokens: int) -> list[list[int]]:
    """Like `cut_by_tokens`, from the lengths of sequences alone."""
    batches: list[list[int]] = []
    room = 0
    for index, length in enumerate(lengths.tolist()):
        room -= length
        if batches and room >= 0:
            batches[-1].append(index)
        else:
            batches.append([index])
            room = tokens - length
    return batches


def shuffled(count: int, *seeds: int) -> list[int]:
    """A permutation of 0..count-1 that depends on `seeds` only."""
    found: list[int] = permutation(count, *seeds).tolist()
    return found


@functools.lru_cache(1)
def permutation(count: int, *seeds: int) -> np.ndarray:
    """Like `shuffled`, int64 [count], not to be changed. The last one is kept for the next step."""
    found = np.random.default_rng(list(seeds)).permutation(count)
    found.setflags(write=False)
    return found


def _tensor(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
