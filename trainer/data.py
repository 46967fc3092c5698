"""Token sequences as packed batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from contracts.episodes import TokenRole
from contracts.routing import Routes
from trainer.errors import TrainingDataError
from trainer.model import Batch


@dataclass(frozen=True)
class ScoredSequence:
    """One sequence with the positions that a loss uses."""

    token_ids: np.ndarray
    """int64 [length]."""
    scored: np.ndarray
    """int64, ascending: positions of the policy's tokens. Never 0, since no earlier token predicts it."""
    routes: Routes | None = None
    """Experts to replay; see `contracts.routing`."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.token_ids)

    @property
    def first_turn(self) -> int:
        """Number of `scored` positions in the first contiguous run."""
        breaks = np.flatnonzero(np.diff(self.scored) != 1)
        return int(breaks[0]) + 1 if len(breaks) else len(self.scored)


def read_sequences(table: pa.Table, what: str, vocabulary: int, longest: int) -> list[ScoredSequence]:
    """Sequences from rows with `token_ids` and `token_role`. Raises TrainingDataError with `what` and the row
    number.
    """
    ids, roles = table.column("token_ids").to_pylist(), table.column("token_role").to_pylist()
    found = []
    for index, (row, role) in enumerate(zip(ids, roles, strict=True)):
        sequence = ScoredSequence(np.asarray(row, np.int64), np.flatnonzero(np.asarray(role) == TokenRole.POLICY))
        if len(row) != len(role) or not len(row):
            raise TrainingDataError(
                f"{what} row {index} has {len(row)} tokens and {len(role)} roles: build the table again"
            )
        if sequence.token_ids.max() >= vocabulary or sequence.token_ids.min() < 0:
            raise TrainingDataError(
                f"{what} row {index} has a token id outside 0..{vocabulary - 1}: the table was made with another"
                " tokenizer; build it again"
            )
        if len(row) > longest:
            raise TrainingDataError(
                f"{what} row {index} has {len(row)} tokens, the model accepts {longest}: raise model.max_positions"
            )
        if not len(sequence.scored) or sequence.scored[0] == 0:
            raise TrainingDataError(
                f"{what} row {index} has no policy token after its first position: leave the row out"
            )
        found.append(sequence)
    return found


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


def cut_by_tokens(sequences: Sequence[ScoredSequence], tokens: int) -> list[list[int]]:
    """Indices of `sequences`, in order, in microbatches of at most `tokens`, but at least one sequence."""
    batches: list[list[int]] = []
    room = 0
    for index, sequence in enumerate(sequences):
        room -= sequence.length
        if batches and room >= 0:
            batches[-1].append(index)
        else:
            batches.append([index])
            room = tokens - sequence.length
    return batches


def shuffled(count: int, *seeds: int) -> list[int]:
    """A permutation of 0..count-1 that depends on `seeds` only."""
    return [int(index) for index in np.random.default_rng(list(seeds)).permutation(count)]


def _tensor(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
