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
from trainer.config import GrpoConfig
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
    advantages: Tensor
    """float32 [rows]."""
    reward_mean: float
    """Mean reward of all graded members."""
    members: int
    """Graded episodes, kept or not."""


def read_experience(dataset: Artifact, config: Mapping[str, Any], grpo: GrpoConfig, seed: int) -> Experience | None:
    """Rows of `dataset`, or None if it has none.

    Raises TrainingDataError, which names the invalid row or episode.
    """
    columns = ["episode_id", "group_id", "token_ids", "token_role", "logprobs"]
    if grpo.routing_replay:
        columns.append(ROUTED_EXPERTS.name)
    train = dataset.table("train.parquet", columns)
    if not train.num_rows:
        return None
    where = f"{dataset.ref.uri}/train.parquet"
    sequences = read_sequences(train, where, config["vocab_size"], config["max_position_embeddings"])
    if grpo.routing_replay:
        sequences = with_routes(sequences, train.column(ROUTED_EXPERTS.name), where, config)
    members = dataset.table("members.parquet", ["episode_id", "group_id", "reward", "group_reward_mean"])
    members = members.filter(pc.is_valid(members.column("reward"))).sort_by(
        [("group_id", "ascending"), ("episode_id", "ascending")]
    )
    advantages = member_advantages(members, permute_seed=seed if grpo.permute_rewards else None)
    episodes = train.column("episode_id").to_pylist()
    lost = next((episode for episode in episodes if episode not in advantages), None)
    if lost is not None:
        raise TrainingDataError(
            f"{dataset.ref.uri}: episode {lost} is in train.parquet, but members.parquet has no reward for it:"
            " build the dataset again"
        )
    names = train.column("group_id").to_pylist()
    numbers = {name: index for index, name in enumerate(sorted(set(names)))}
    return Experience(
        episodes=episodes,
        group_names=names,
        sequences=sequences,
        sampler_logprobs=_sampler_logprobs(train.column("logprobs"), sequences, where),
        groups=[numbers[name] for name in names],
        advantages=torch.tensor([advantages[episode] for episode in episodes], dtype=torch.float32),
        reward_mean=float(pc.mean(members.column("reward")).as_py()),
        members=members.num_rows,
    )


def member_advantages(members: pa.Table, permute_seed: int | None) -> dict[str, float]:
    """Advantage by episode_id, over graded members sorted by group and episode.

    Reward minus its group's mean: GRPO (arXiv:2402.03300) without the division by the deviation (Dr. GRPO,
    arXiv:2503.20783).

    The mean is the dataset's, over ALL graded members, including those left out of training. permute_seed: control
    experiment that permutes each group's rewards at random.
    """
    groups = np.asarray(members.column("group_id").to_pylist())
    rewards = np.asarray(members.column("reward").to_pylist(), np.float64)
    means = np.asarray(members.column("group_reward_mean").to_pylist(), np.float64)
    if permute_seed is not None:
        for name in sorted(set(groups.tolist())):
            own = np.flatnonzero(groups == name)
            draw = np.random.default_rng(int(digest_of([permute_seed, name])[:16], 16))
            rewards[own] = rewards[draw.permutation(own)]
    return dict(zip(members.column("episode_id").to_pylist(), (rewards - means).tolist(), strict=True))


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
