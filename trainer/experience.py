"""Read a dataset artifact for the policy loss: kept sequences with the sampler's logprobs and advantages.

The file is read batch by batch into flat arrays, which leave the memory if they are large (`trainer.flat`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from contracts.artifacts import Artifact
from contracts.digests import digest_of
from contracts.episodes import HIGHEST_LOGPROB, ROUTED_EXPERTS, SUPPORTS
from trainer.algorithms.advantages import reward_advantages
from trainer.algorithms.base import Advantage
from trainer.algorithms.ppo import Ppo
from trainer.config import RlConfig
from trainer.data import Rows, RowsReader, ScoredSequence, count_tokens
from trainer.errors import TrainingDataError
from trainer.flat import Ragged, flat_array
from trainer.routing import read_routes
from trainer.supports import read_supports

_TRAIN = "train.parquet"


@dataclass(frozen=True)
class Experience:
    """The rows of train.parquet."""

    episodes: Sequence[str]
    """Episode id of each row."""
    sequences: Sequence[ScoredSequence]
    sampler_logprobs: Sequence[Tensor]
    """float32 [policy tokens] of each row."""
    group_names: Sequence[str]
    """Group id of each row."""
    groups: Sequence[int]
    """Group number of each row, in the order of the ids."""
    rewards: Tensor
    """float64 [rows]."""
    advantages: Tensor | None
    """float32 [rows]; None for an algorithm that derives them from values."""
    reward_mean: float
    """Mean reward of all graded members."""
    members: int
    """Graded episodes, kept or not."""
    folder: Path | None = None
    """For files of what is too large for the memory; None: nothing is."""


def read_experience(
    dataset: Artifact, config: Mapping[str, Any], rl: RlConfig, seed: int, folder: Path | None = None
) -> Experience | None:
    """Rows of `dataset`, or None if it has none. config: the model's config.json. folder: see Experience.

    Raises TrainingDataError, which names the invalid row or episode.
    """
    where = f"{dataset.ref.uri}/{_TRAIN}"
    sequences, logprobs = _read_rows(dataset, where, config, folder)
    if not len(sequences):
        return None
    if rl.routing_replay:
        batches = dataset.batches(_TRAIN, [ROUTED_EXPERTS.name])
        values = (value.as_py() for batch in batches for value in batch.column(0))
        sequences.routes = read_routes(sequences, values, where, config, folder)

    def supports() -> Iterator[pa.Array]:
        return (batch.column(0) for batch in dataset.batches(_TRAIN, [SUPPORTS.name]))

    sequences.supports = read_supports(sequences, supports, where, config["vocab_size"], folder)
    names = dataset.table(_TRAIN, ["episode_id", "group_id"])
    episodes, groups = (names.column(each).combine_chunks() for each in names.column_names)
    members = dataset.table("members.parquet", ["episode_id", "group_id", "reward", "group_reward_mean"])
    members = members.filter(pc.is_valid(members.column("reward"))).sort_by(
        [("group_id", "ascending"), ("episode_id", "ascending")]
    )
    rewards = member_rewards(members, permute_seed=seed if rl.permute_rewards else None)
    rows = _member_of(episodes, members, dataset)
    advantages = None
    if not isinstance(rl.algorithm, Ppo):
        own = member_advantages(members, rewards, rl.algorithm.advantage)[rows]
        _require_baselines(own, episodes, dataset, rl.algorithm.advantage)
        advantages = torch.from_numpy(own).float()
    return Experience(
        episodes=_Words(episodes),
        group_names=_Words(groups),
        sequences=sequences,
        sampler_logprobs=logprobs,
        groups=_numbers(groups).tolist(),
        rewards=torch.from_numpy(rewards[rows]),
        advantages=advantages,
        reward_mean=float(pc.mean(members.column("reward")).as_py()),
        members=members.num_rows,
        folder=folder,
    )


class _Words(Sequence[str]):
    """Strings in Arrow's form, which takes a fraction of the memory of Python's."""

    def __init__(self, values: pa.Array) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> list[str]: ...
    def __getitem__(self, row: int | slice) -> str | list[str]:
        found: str | list[str] = self._values[row].to_pylist() if isinstance(row, slice) else self._values[row].as_py()
        return found


def _read_rows(dataset: Artifact, where: str, config: Mapping[str, Any], folder: Path | None) -> tuple[Rows, Ragged]:
    """Sequences, and the sampler's log probabilities of their policy tokens."""
    tokens = count_tokens(dataset.path(_TRAIN))
    reader = RowsReader(where, config["vocab_size"], config["max_position_embeddings"], tokens, folder)
    flat, end = flat_array(tokens, np.float32, folder), 0
    for batch in dataset.batches(_TRAIN, ["token_ids", "token_role", "logprobs"]):
        first, policy = reader.rows, reader.add(batch)
        own = _sampler_logprobs(batch, policy, where, first)
        flat[end : end + len(own)] = own
        end += len(own)
    sequences = reader.finish()
    return sequences, Ragged(flat[:end], sequences.scored)


def _member_of(episodes: pa.Array, members: pa.Table, dataset: Artifact) -> np.ndarray:
    """int64 [rows]: place of each row's episode in `members`. Raises TrainingDataError for the first without one."""
    found = pc.index_in(episodes, value_set=members.column("episode_id").combine_chunks())
    if found.null_count:
        lost = episodes[int(np.flatnonzero(found.is_null().to_numpy(zero_copy_only=False))[0])]
        raise TrainingDataError(
            f"{dataset.ref.uri}: episode {lost} is in train.parquet, but members.parquet has no reward for it:"
            " build the dataset again"
        )
    return np.asarray(found.to_numpy(), np.int64)


def _numbers(names: pa.Array | pa.ChunkedArray) -> np.ndarray:
    """int64 [rows]: number of each name in the order of the distinct names."""
    distinct = pc.unique(names).sort()
    return np.asarray(pc.index_in(names, value_set=distinct).to_numpy(), np.int64)


def member_rewards(members: pa.Table, permute_seed: int | None) -> np.ndarray:
    """Reward of each graded member, float64, over members sorted by group and episode.

    permute_seed: control experiment that permutes each group's rewards at random.
    """
    rewards = np.array(members.column("reward").to_numpy(), np.float64)
    if permute_seed is None:
        return rewards
    groups = np.asarray(members.column("group_id").to_pylist())
    for name in sorted(set(groups.tolist())):
        own = np.flatnonzero(groups == name)
        draw = np.random.default_rng(int(digest_of([permute_seed, name])[:16], 16))
        rewards[own] = rewards[draw.permutation(own)]
    return rewards


def member_advantages(members: pa.Table, rewards: np.ndarray, kind: Advantage) -> np.ndarray:
    """Advantage of each graded member, float64; NaN where the group has too few members.

    Groups and means are the dataset's, over ALL graded members, including those left out of training.
    """
    means = np.asarray(members.column("group_reward_mean").to_numpy(), np.float64)
    return reward_advantages(rewards, _numbers(members.column("group_id")), means, kind)


def _require_baselines(advantages: np.ndarray, episodes: pa.Array, dataset: Artifact, kind: Advantage) -> None:
    """Raise TrainingDataError for the first row without an advantage."""
    lost = np.flatnonzero(np.isnan(advantages))
    if len(lost):
        raise TrainingDataError(
            f"{dataset.ref.uri}: episode {episodes[int(lost[0])]} is the only graded member of its group, so"
            f" trainer.algorithm.advantage {kind} has no baseline: use group_mean, or raise rollouts.group_size"
        )


def _sampler_logprobs(batch: pa.RecordBatch, policy: np.ndarray, where: str, first: int) -> np.ndarray:
    """float32 [policy tokens of the batch]. policy: bool [tokens]. first: row number of the batch's first row.

    Raises TrainingDataError for the first row that lacks one, or has one above 0.
    """
    column = batch.column("logprobs")
    lengths = pc.fill_null(pc.list_value_length(batch.column("token_ids")), 0).to_numpy(zero_copy_only=False)
    values = column.flatten().to_numpy(zero_copy_only=False)
    whole = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False) == lengths
    ends = np.cumsum(lengths)
    if whole.all():
        lost = policy & ~np.isfinite(values)
        bad = [int(np.searchsorted(ends, np.argmax(lost), "right"))] if lost.any() else []
    else:
        bad = [int(np.argmin(whole))]
    if bad:
        raise TrainingDataError(
            f"{where} row {first + bad[0]} lacks the logprob of a policy token: only sampled tokens may carry the role"
            " POLICY"
        )
    high = np.flatnonzero(policy & (values > HIGHEST_LOGPROB))
    if len(high):
        raise TrainingDataError(
            f"{where} row {first + int(np.searchsorted(ends, high[0], 'right'))} has the log probability"
            f" {values[high[0]]:g} of a policy token, which is at most 0: write the natural logarithm, with its sign"
        )
    return np.asarray(values[policy], np.float32)
