"""Arrays of token ids, and the types of what goes in and out of an episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from contracts.pb import bridge_pb2 as pb
from contracts.supports import Supports
from inference.bridge.errors import BadMessage

Ids = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
AnyIds = Sequence[int] | npt.NDArray[Any]
"""Token ids as a caller has them: a sequence or a one-dimensional array of integers."""
_INT32 = np.iinfo(np.int32)


class Finish(StrEnum):
    """Why a turn ended."""

    STOP = "stop"
    """One of the stop tokens was sampled; it is the last token."""
    LENGTH = "length"
    """The turn has `max_tokens` tokens."""
    CONTEXT = "context"
    """The context is full."""
    DEADLINE = "deadline"
    """`turn_s` is over."""
    CANCELLED = "cancelled"
    """Someone cancelled it; what was sampled stays."""
    STALE = "stale"
    """The pinned version is not served any more."""
    ENGINE_LOST = "engine_lost"
    """The engine failed; what was sampled stays."""


FINISHES = {value: Finish(name.lower()) for name, value in pb.Finish.items()}
"""By the protocol's numbers."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a turn is sampled. At a step, these replace those of the start for that turn."""

    temperature: float = 1.0
    """0 is greedy."""
    max_tokens: int = 0
    """Of one turn; 0: as many as the context holds."""
    seed: int | None = None
    """The random number of a token depends on (seed, position) alone. None: drawn."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of them ends the turn and keeps it."""

    def message(self, seed: int) -> pb.Sampling:
        """As a message. seed: the one to use where none is set."""
        return pb.Sampling(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            seed=seed if self.seed is None else self.seed,
            stop_token_ids=self.stop_token_ids,
        )


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one turn that one policy version made."""

    version: str
    first: int
    """Place among the turn's policy tokens."""
    end: int
    """Place after the last one."""


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """Consecutive policy tokens of a turn that is still sampled."""

    first: int
    """Place of the first one among the turn's policy tokens."""
    token_ids: Ids
    """[n], read-only."""
    logprobs: Logprobs
    """[n], natural logarithm, under the distribution sampled from; of temperature 1 where greedy. Read-only."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool of a hosted episode answered."""

    name: str
    arguments: str
    """Canonical JSON."""
    ok: bool
    text: str
    """What the policy sees."""


@dataclass(frozen=True, eq=False, slots=True)
class Reply:
    """What the environment of a hosted episode replied to a turn."""

    observation_ids: Ids
    """[n] environment tokens that the next turn is sampled after, read-only; empty when the episode is over."""
    results: tuple[ToolResult, ...]
    """In the order of the turn's calls."""
    format_error: str
    """Why the calls can't be parsed; empty if they can."""
    done: bool
    """Whether the episode is over."""
    outcome: str
    """Once it is over: completed, truncated, timed_out, format_error, failed, aborted or infra_error."""
    failure: str
    """Cause of the outcomes failed and infra_error."""
    reward: float | None
    """None: not over, or not scored."""
    components: Mapping[str, float]
    """Contributions to the reward, by name."""
    verdict: str
    """Once it is graded: how the hidden tests ended."""


@dataclass(frozen=True, eq=False, slots=True)
class Turn:
    """One turn of the policy that has ended."""

    step: int
    """1, 2, ..."""
    observation_ids: Ids
    """[m] environment tokens before the turn, read-only."""
    token_ids: Ids
    """[n] policy tokens, read-only."""
    logprobs: Logprobs
    """[n], as those of a piece."""
    spans: tuple[Span, ...]
    """Versions of the tokens, contiguous and complete."""
    finish: Finish
    reply: Reply | None = None
    """Of hosted episodes; None for others."""
    supports: Supports | None = None
    """What each token was drawn from, of an episode with a grammar or top_p: normalize over that to train on it."""
    forced: npt.NDArray[np.bool_] | None = None
    """[n] whether the grammar left no other token, where there are supports: such tokens have no gradient."""
    log_mass: Logprobs | None = None
    """[n] log probability of each support under the whole distribution, at most 0; None without supports. The sum with
    `logprobs` is the log probability under the whole distribution. NaN if the engine does not report it. Read-only.
    """


@dataclass(frozen=True, slots=True)
class Record:
    """An ended episode as the bridge keeps it: a row of EPISODES and a row of SEQUENCES (contracts.episodes), two Arrow
    IPC streams one after the other. `pyarrow.ipc.open_stream` reads them.
    """

    episode_id: str
    data: bytes
    digest: str
    """SHA-256 of `data` in hex digits, verified."""


@dataclass(frozen=True, eq=False, slots=True)
class Score:
    """Log-probabilities of given tokens."""

    logprobs: Logprobs
    """[n], of each token given the ones before; 0 for the first. Read-only."""
    version: str
    """Policy version that they are of."""


@dataclass(frozen=True, slots=True)
class Info:
    """What a bridge serves."""

    versions: tuple[str, ...]
    """Policies that can be pinned, newest first."""
    vocabulary: int
    """Token ids are in [0, vocabulary); 0: unknown."""
    context_tokens: int
    """Longest context; 0: unknown."""
    credits: int
    """Steps that one client may have in flight."""
    lease_s: float
    """Longest lease in seconds."""
    max_episodes: int
    """Open episodes of all clients."""
    hosted_tasks: int = 0
    """Tasks that `start_task` may name."""


def reply_of(end: pb.StepEnd) -> Reply:
    """The environment's reply in the end of a hosted turn."""
    return Reply(
        ids_of(end.observation_ids),
        tuple(ToolResult(each.name, each.arguments, each.ok, each.text) for each in end.results),
        end.format_error,
        end.done,
        end.outcome,
        end.failure,
        end.reward if end.HasField("reward") else None,
        dict(end.components),
        end.verdict,
    )


def ids_bytes(tokens: AnyIds, field: str) -> bytes:
    """Token ids as little-endian int32. Raises BadMessage for what is not a row of int32 numbers."""
    try:
        array = np.asarray(tokens)
    except (ValueError, OverflowError) as error:
        raise BadMessage(f"{field}: not a row of token ids: {error}") from error
    if array.size == 0:
        return b""
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise BadMessage(
            f"{field} has shape {array.shape} and type {array.dtype}: give a one-dimensional row of integers"
        )
    if array.dtype.itemsize > 4 or array.dtype.kind == "u":
        low, high = int(array.min()), int(array.max())
        if low < _INT32.min or high > _INT32.max:
            raise BadMessage(f"{field} has {low if low < _INT32.min else high}: token ids are int32")
    return array.astype("<i4", copy=False).tobytes()


def ids_of(data: bytes) -> Ids:
    """[n] token ids of little-endian int32, read-only, without a copy."""
    return np.frombuffer(data, "<i4")


def logprobs_of(data: bytes) -> Logprobs:
    """[n] log-probabilities of little-endian float32, read-only, without a copy."""
    return np.frombuffer(data, "<f4")
