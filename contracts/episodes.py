"""Tables of episodes. An episode is one attempt at a task by a policy in a sandbox; its sequences contain the tokens.

Text is decoded from tokens; sampled tokens are never tokenized again. A column that older stores lack is also declared
in `contracts.upgrades`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

import pyarrow as pa

from contracts.digests import digest_of


class TokenRole(IntEnum):
    """Source of a token in a sequence. Only POLICY tokens have a logprob and a gradient."""

    PROMPT = 0
    POLICY = 1
    ENVIRONMENT = 2
    FORCED = 3


HIGHEST_LOGPROB = 1e-3
"""Largest log probability of a POLICY token; above 0 for the sake of rounding."""


class Outcome(StrEnum):
    """Result of an episode. `INFRA_ERROR` is retried and never scored."""

    SOLVED = "solved"
    FAILED = "failed"
    """The policy broke its own sandbox; `Episode.failure` gives the cause. Scores 0."""
    COMPLETED = "completed"
    """The policy ended the episode; not graded yet. Rollouts write this outcome; grading decides between solved and
    failed.
    """
    TRUNCATED = "truncated"
    """The episode ran out of tokens or turns."""
    TIMED_OUT = "timed_out"
    FORMAT_ERROR = "format_error"
    """A tool call that can't be parsed ended the episode."""
    ABORTED = "aborted"
    """Over-sampling: canceled while running, since enough others of its group had finished. Not scored; its tokens are
    kept.
    """
    DROPPED = "dropped"
    """Over-sampling: finished, but not selected. Not scored; its tokens are kept."""
    INFRA_ERROR = "infra_error"
    UNFINISHED = "unfinished"
    """Carried over: stopped between two turns, and continued in the next iteration. Rollouts have no such rows, only
    artifacts of the kinds `group` and `unfinished`.
    """


STRAGGLERS = (Outcome.ABORTED, Outcome.DROPPED)
"""Outcomes of over-sampled episodes that were not selected: they have rows, but no reward, and do not train."""


@dataclass(frozen=True)
class Slot:
    """Identity and seed of an episode, independent of worker and time."""

    experiment: str
    iteration: str
    """Partition key such as "0003", or the name of an evaluation split."""
    group: str
    """group_id of the episode's group; a task that is drawn twice has two groups. Evaluations have no groups and use
    the task's id.
    """
    task_id: str
    sample: int
    seed: int
    """The experiment's seed."""

    @property
    def digest(self) -> str:
        """Digest of the slot."""
        return digest_of([self.experiment, self.iteration, self.group, self.task_id, self.sample, self.seed])

    @property
    def token_seed(self) -> int:
        """63-bit seed for sampling in this slot."""
        return int(self.digest[:16], 16) >> 1


def episode_id(slot: Slot, action_key: str, attempt: int = 0) -> str:
    """Id of an episode: H(slot, action key, attempt), 32 hex digits."""
    return digest_of([slot.digest, action_key, attempt])[:32]


_TOOL_CALL = pa.struct(
    [
        ("turn", pa.int32()),
        ("name", pa.string()),
        ("arguments", pa.string()),
        ("ok", pa.bool_()),
        ("result", pa.string()),
    ]
)
_STATE = pa.struct([("kind", pa.string()), ("digest", pa.string())])
_SPAN = pa.struct([("version", pa.string()), ("start", pa.int32()), ("end", pa.int32())])

EPISODES = pa.schema(
    [
        ("episode_id", pa.string()),
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("task_digest", pa.string()),
        ("image_digest", pa.string()),
        ("sample", pa.int32()),
        ("attempt", pa.int32()),
        ("seed", pa.int64()),
        ("policy_version", pa.string()),
        ("temperature", pa.float32()),
        ("max_tokens", pa.int32()),
        ("outcome", pa.string()),
        ("failure", pa.string()),
        ("turns", pa.int32()),
        ("tool_calls", pa.list_(_TOOL_CALL)),
        ("format_errors", pa.int32()),
        ("policy_tokens", pa.int32()),
        ("final_state", pa.list_(_STATE)),
        ("final_diff", pa.binary()),
    ]
)
"""One row per episode. `failure` is the cause of outcome failed, else null; `tool_calls.arguments` is canonical JSON;
`image_digest` is the digest of the task's files, `final_state` that of `final_diff`: the bytes of the
final state, in git format unless its kind is another (contracts/final_states.py).
"""

SEQUENCES = pa.schema(
    [
        ("episode_id", pa.string()),
        ("index", pa.int32()),
        ("token_ids", pa.list_(pa.int32())),
        ("token_role", pa.list_(pa.uint8())),
        ("logprobs", pa.list_(pa.float32())),
        ("policy_spans", pa.list_(_SPAN)),
    ]
)
"""One row per sequence; the three lists have equal length. `logprobs`, under the sampling distribution, is null for
tokens that are not POLICY.
"""
ROUTED_EXPERTS = pa.field("routed_experts", pa.large_binary())
"""Optional column of SEQUENCES, absent unless `rollouts.record_routing` is set: see `contracts.routing`. Null for
a sequence of which the policy sampled no token.
"""
SUPPORTS = pa.field("supports", pa.large_binary())
"""Optional column of SEQUENCES, absent unless the rollouts sample from part of the vocabulary (`rollouts.grammar`,
`rollouts.top_p`): see `contracts.supports`. Null for a sequence whose tokens were all drawn from the whole vocabulary.
"""

TELEMETRY = pa.schema(
    [
        ("episode_id", pa.string()),
        ("seconds", pa.float64()),
        ("sampling_seconds", pa.float64()),
        ("tool_seconds", pa.float64()),
        ("host", pa.string()),
        ("engine_tokens", pa.int64()),
        ("retries", pa.int32()),
    ]
)
"""Costs and timings, outside every digest."""


@dataclass(frozen=True)
class ToolCallRecord:
    """One executed tool call. turn counts the policy's turns from 0."""

    turn: int
    name: str
    arguments: str
    ok: bool
    result: str


@dataclass(frozen=True)
class TokenSequence:
    """Tokens of one context, in order. All lists have the same length."""

    token_ids: list[int]
    token_role: list[int]
    logprobs: list[float | None]
    policy_spans: list[tuple[str, int, int]]
    """(policy version, start, end) over token positions, half open."""
    routed_experts: bytes | None = None
    """Experts that the sampler chose, as `contracts.routing.encode_routes` gives them; None if not recorded."""
    supports: bytes | None = None
    """Sets that the tokens were drawn from, as `contracts.supports.encode_supports` gives them; None: all."""


@dataclass(frozen=True)
class Episode:
    """One attempt at a task: events, tokens and costs."""

    episode_id: str
    group_id: str
    task_id: str
    task_digest: str
    files_digest: str
    """Digest of the files that the sandbox started from; the column `image_digest`."""
    sample: int
    attempt: int
    """Number of the attempt, from 0. Always 0 under the deterministic profile, where all attempts give the same result;
    telemetry counts them.
    """
    seed: int
    policy_version: str
    temperature: float
    max_tokens: int
    outcome: Outcome
    turns: int
    tool_calls: list[ToolCallRecord]
    format_errors: int
    final_diff: bytes
    sequences: list[TokenSequence]
    failure: str | None = None
    """Explanation of outcome FAILED."""
    final_kind: str = "diff"
    """Kind of the final state (contracts/final_states.py), whose bytes are `final_diff`."""
    telemetry: dict[str, Any] = field(default_factory=dict)
    """Columns of TELEMETRY, except episode_id."""

    @property
    def final_state(self) -> str:
        """Digest of the final state."""
        from contracts.digests import sha256

        return sha256(self.final_diff)

    @property
    def policy_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return sum(role == TokenRole.POLICY for sequence in self.sequences for role in sequence.token_role)


def episodes_table(episodes: list[Episode]) -> pa.Table:
    """Rows of EPISODES in the order given."""
    rows = []
    for episode in episodes:
        row: dict[str, Any] = {
            name: getattr(episode, name)
            for name in EPISODES.names
            if name not in ("image_digest", "tool_calls", "final_state", "outcome")
        }
        row["image_digest"] = episode.files_digest
        row["outcome"] = episode.outcome.value
        row["tool_calls"] = [vars(call) for call in episode.tool_calls]
        row["final_state"] = [{"kind": episode.final_kind, "digest": episode.final_state}]
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=EPISODES)


def sequences_table(episodes: list[Episode], *optional: pa.Field) -> pa.Table:
    """Rows of SEQUENCES, episode by episode. optional: columns to append, of ROUTED_EXPERTS and SUPPORTS."""
    rows = [
        {
            "episode_id": episode.episode_id,
            "index": index,
            "token_ids": sequence.token_ids,
            "token_role": sequence.token_role,
            "logprobs": sequence.logprobs,
            "policy_spans": [
                {"version": version, "start": start, "end": end} for version, start, end in sequence.policy_spans
            ],
            ROUTED_EXPERTS.name: sequence.routed_experts,
            SUPPORTS.name: sequence.supports,
        }
        for episode in episodes
        for index, sequence in enumerate(episode.sequences)
    ]
    return pa.Table.from_pylist(rows, schema=pa.schema([*SEQUENCES, *optional]))


def telemetry_table(episodes: list[Episode]) -> pa.Table:
    """Rows of TELEMETRY; unknown values are null."""
    return pa.Table.from_pylist(
        [{"episode_id": episode.episode_id, **episode.telemetry} for episode in episodes], schema=TELEMETRY
    )


def read_episodes(episodes: pa.Table, sequences: pa.Table) -> list[Episode]:
    """Episodes from the tables of `episodes_table` and `sequences_table`, without telemetry, in order."""
    by_episode: dict[str, list[TokenSequence]] = {}
    for row in sorted(sequences.to_pylist(), key=lambda row: (row["episode_id"], row["index"])):
        spans = [(span["version"], span["start"], span["end"]) for span in row["policy_spans"]]
        by_episode.setdefault(row["episode_id"], []).append(
            TokenSequence(
                row["token_ids"],
                row["token_role"],
                row["logprobs"],
                spans,
                row.get(ROUTED_EXPERTS.name),
                row.get(SUPPORTS.name),
            )
        )
    found = []
    for row in episodes.to_pylist():
        other = ("image_digest", "tool_calls", "final_state", "outcome", "policy_tokens")
        known = {name: row[name] for name in row if name not in other}
        calls = [ToolCallRecord(**call) for call in row["tool_calls"]]
        found.append(
            Episode(
                **known,
                files_digest=row["image_digest"],
                outcome=Outcome(row["outcome"]),
                tool_calls=calls,
                final_kind=row["final_state"][0]["kind"],
                sequences=by_episode.get(row["episode_id"], []),
            )
        )
    return found


def lacks_variance(values: Iterable[Hashable | None]) -> bool:
    """Whether all graded members (not None) of a group have the same value, or there are none.

    The only definition of variance, for refills and the dataset; it compares the hidden tests' results (`solved`).
    """
    return len({value for value in values if value is not None}) < 2
