"""The dataset: which of an iteration's sequences train, and why each other one does not (DuckDB over Parquet).

    episodes + rewards -> reason per episode -> members.parquet (every episode)
    sequences of those without a reason      -> train.parquet

Holds rewards and groups, never advantages: the trainer computes those, from all graded members of a group, so a member that is left out for
its length still counts in its group's mean. An iteration with nothing to learn from is legitimate: train.parquet is then empty, the report
says so, and the trainer takes no step.
"""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from contracts.artifacts import Artifact, ArtifactWriter, Frozen
from curation.errors import RewardsMismatch

DATASET_VERSION = "1"
"""Code version of the `dataset` step."""

REASONS = ("infra_error", "not_graded", "empty", "zero_variance", "too_long", "truncated")
"""Why an episode is left out; of several, the first in this order is recorded.

infra_error: the sandbox or engine failed. not_graded: no reward (verifier fault, or aborted). empty: no token sampled.
zero_variance: all graded members of its group have the same reward. too_long: a sequence exceeds max_tokens. truncated: see DatasetConfig.
"""

TRAIN = pa.schema(
    [
        ("episode_id", pa.string()),
        ("group_id", pa.string()),
        ("group_index", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("token_role", pa.list_(pa.uint8())),
        ("logprobs", pa.list_(pa.float32())),
        ("policy_versions", pa.list_(pa.string())),
        ("reward", pa.float32()),
    ]
)
"""One row a kept sequence, by group, sample, sequence. group_index: dense over kept groups, in rollouts order. policy_versions: distinct, sorted."""

MEMBERS = pa.schema(
    [
        ("episode_id", pa.string()),
        ("group_id", pa.string()),
        ("reward", pa.float32()),
        ("kept", pa.bool_()),
        ("reason", pa.string()),
        ("group_reward_mean", pa.float64()),
        ("group_reward_std", pa.float64()),
        ("length", pa.int32()),
    ]
)
"""One row an episode, in rollouts order. Mean and population deviation are over all graded members of the group, kept or not (null: none
is graded). length: tokens of the longest sequence."""


class DatasetConfig(BaseModel):
    """What is left out of training."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drop_zero_variance: bool = True
    """Leave out groups whose graded members all have the same reward: their advantages are 0."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Longest sequence that trains, in tokens; null: any length."""
    drop_truncated: bool = False
    """Leave out episodes that ran out of tokens or turns. They still count in their group's mean."""


class DatasetReport(Frozen):
    """What the dataset holds, for people and metadata."""

    episodes: int
    groups: int
    kept_episodes: int
    kept_groups: int
    sequences: int
    tokens: int
    policy_tokens: int
    reward_mean: float | None
    """Over all graded episodes."""
    reasons: dict[str, int]
    """Episodes left out, by reason; every reason is present."""

    @property
    def empty(self) -> bool:
        """Nothing to learn from: the trainer takes no step."""
        return self.sequences == 0
