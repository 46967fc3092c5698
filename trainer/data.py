"""Token sequences as padded batches."""

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
    """Pad sequences at the right to the length of the longest."""
    length = max(sequence.length for sequence in sequences)
    ids = np.zeros((len(sequences), length), np.int64)
    rows, targets, owners = [], [], []
    for index, sequence in enumerate(sequences):
        ids[index, : sequence.length] = sequence.token_ids
        rows.append(index * length + sequence.scored - 1)
        targets.append(sequence.token_ids[sequence.scored])
        owners.append(np.full(len(sequence.scored), index))
    return Batch(
        token_ids=torch.from_numpy(ids),
        rows=_tensor(rows),
        targets=_tensor(targets),
        owners=_tensor(owners),
        lengths=torch.tensor([sequence.length for sequence in sequences]),
        routed=_routed(sequences, length),
    )


def _routed(sequences: Sequence[ScoredSequence], length: int) -> Tensor | None:
    """`Batch.routed` of sequences padded to `length`; None if none has routes."""
    known = [(index, each.routes) for index, each in enumerate(sequences) if each.routes is not None]
    if not known:
        return None
    padded = np.full((len(sequences), length, *known[0][1].shape[1:]), -1, np.int32)
    for index, routes in known:
        padded[index, : len(routes)] = routes
    return torch.from_numpy(padded).flatten(0, 1)


def cut_by_length(sequences: Sequence[ScoredSequence], tokens: int) -> list[list[int]]:
    """Indices of `sequences` in microbatches of similar length, each of at most `tokens` with padding, but at least one
    sequence.
    """
    order = sorted(range(len(sequences)), key=lambda index: (sequences[index].length, index))
    batches: list[list[int]] = []
    for index in order:
        if batches and (len(batches[-1]) + 1) * sequences[index].length <= tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def shuffled(count: int, *seeds: int) -> list[int]:
    """A permutation of 0..count-1 that depends on `seeds` only."""
    return [int(index) for index in np.random.default_rng(list(seeds)).permutation(count)]


def _tensor(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
