"""Read a dataset artifact for the policy loss: kept sequences with the sampler's logprobs and advantages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from contracts.artifacts import Artifact
from contracts.digests import digest_of
from contracts.episodes import ROUTED_EXPERTS
from trainer.algorithms.advantages import reward_advantages
from trainer.algorithms.base import Advantage
from trainer.algorithms.ppo import Ppo
from trainer.config import RlConfig
from trainer.data import ScoredSequence, read_sequences
from trainer.errors import TrainingDataError
from trainer.routing import with_routes


@dataclass(frozen=True)
class Experience:
    """The rows of train.parquet."""

    episodes: list[str]
    """Episode id of each row."""
    sequences: list[ScoredSequence]
    sampler_logprobs: list[Tensor]
    """float32 [policy tokens] of each row."""
    group_names: list[str]
    """Group id of each row."""
    groups: list[int]
    """Group number of each row, in the order of the ids."""
    rewards: Tensor
    """float64 [rows]."""
    advantages: Tensor | None
    """float32 [rows]; None for an algorithm that derives them from values."""
    reward_mean: float
    """Mean reward of all graded members."""
    members: int
    """Graded episodes, kept or not."""


def read_experience(dataset: Artifact, config: Mapping[str, Any], rl: RlConfig, seed: int) -> Experience | None:
    """Rows of `dataset`, or None if it has none.

    Raises TrainingDataError, which names the invalid row or episode.
    """
    columns = ["episode_id", "group_id", "token_ids", "token_role", "logprobs"]
    if rl.routing_replay:
        columns.append(ROUTED_EXPERTS.name)
    train = dataset.table("train.parquet", columns)
    if not train.num_rows:
        return None
    where = f"{dataset.ref.uri}/train.parquet"
    sequences = read_sequences(train, where, config["vocab_size"], config["max_position_embeddings"])
    if rl.routing_replay:
        sequences = with_routes(sequences, train.column(ROUTED_EXPERTS.name), where, config)
    members = dataset.table("members.parquet", ["episode_id", "group_id", "reward", "group_reward_mean"])
    members = members.filter(pc.is_valid(members.column("reward"))).sort_by(
        [("group_id", "ascending"), ("episode_id", "ascending")]
    )
    rewards = member_rewards(members, permute_seed=seed if rl.permute_rewards else None)
    graded = {episode: index for index, episode in enumerate(members.column("episode_id").to_pylist())}
    episodes = train.column("episode_id").to_pylist()
    lost = next((episode for episode in episodes if episode not in graded), None)
    if lost is not None:
        raise TrainingDataError(
            f"{dataset.ref.uri}: episode {lost} is in train.parquet, but members.parquet has no reward for it:"
            " build the dataset again"
        )
    rows = [graded[episode] for episode in episodes]
    advantages = None
    if not isinstance(rl.algorithm, Ppo):
        own = member_advantages(members, rewards, rl.algorithm.advantage)[rows]
        _require_baselines(own, episodes, dataset, rl.algorithm.advantage)
        advantages = torch.tensor(own.tolist(), dtype=torch.float32)
    names = train.column("group_id").to_pylist()
    numbers = {name: index for index, name in enumerate(sorted(set(names)))}
    return Experience(
        episodes=episodes,
        group_names=names,
        sequences=sequences,
        sampler_logprobs=_sampler_logprobs(train.column("logprobs"), sequences, where),
        groups=[numbers[name] for name in names],
        rewards=torch.from_numpy(rewards[rows]),
        advantages=advantages,
        reward_mean=float(pc.mean(members.column("reward")).as_py()),
        members=members.num_rows,
    )


def member_rewards(members: pa.Table, permute_seed: int | None) -> np.ndarray:
    """Reward of each graded member, float64, over members sorted by group and episode.

    permute_seed: control experiment that permutes each group's rewards at random.
    """
    rewards = np.asarray(members.column("reward").to_pylist(), np.float64)
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
    names = members.column("group_id").to_pylist()
    numbers = {name: index for index, name in enumerate(sorted(set(names)))}
    means = np.asarray(members.column("group_reward_mean").to_pylist(), np.float64)
    return reward_advantages(rewards, np.asarray([numbers[name] for name in names], np.int64), means, kind)


def _require_baselines(advantages: np.ndarray, episodes: list[str], dataset: Artifact, kind: Advantage) -> None:
    """Raise TrainingDataError for the first row without an advantage."""
    lost = np.flatnonzero(np.isnan(advantages))
    if len(lost):
        raise TrainingDataError(
            f"{dataset.ref.uri}: episode {episodes[lost[0]]} is the only graded member of its group, so"
            f" trainer.algorithm.advantage {kind} has no baseline: use group_mean, or raise rollouts.group_size"
        )


def _sampler_logprobs(column: pa.ChunkedArray, sequences: list[ScoredSequence], where: str) -> list[Tensor]:
    found = []
    for index, (row, sequence) in enumerate(zip(column.to_pylist(), sequences, strict=True)):
        values = np.asarray([row[position] for position in sequence.scored], np.float64)
        if not np.isfinite(values).all():
            raise TrainingDataError(
                f"{where} row {index} lacks the logprob of a policy token: only sampled tokens may carry the role"
                " POLICY"
            )
        found.append(torch.from_numpy(values.astype(np.float32)))
    return found
