"""An ended episode as its client gets it: a row of EPISODES and a row of SEQUENCES, as two Arrow IPC streams one after
the other.

What EPISODES has no column for (reward, components, verdict, labels, version rule) is JSON in the metadata of its
schema, under METADATA. The labels task_id, task_digest and image_digest are those columns.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from contracts.digests import sha256
from contracts.episodes import EPISODES, SEQUENCES, SUPPORTS, Outcome, TokenRole
from contracts.pb import bridge_pb2 as pb
from contracts.supports import SupportsWriter, encode_supports
from inference.bridge.episode import Episode
from inference.bridge.hosted.state import Final, call_records

METADATA = b"triplane.bridge"
PIECE_BYTES = 1 << 20
"""Longest piece of a record in one message."""
_OUTCOMES: dict[int | None, Outcome] = {
    pb.LENGTH: Outcome.TRUNCATED,
    pb.CONTEXT: Outcome.TRUNCATED,
    pb.DEADLINE: Outcome.TIMED_OUT,
    pb.STALE: Outcome.INFRA_ERROR,
    pb.ENGINE_LOST: Outcome.INFRA_ERROR,
}
"""By the finish of the last turn; all others are COMPLETED."""


def chunks(episode: Episode) -> Iterator[pb.EpisodeChunk]:
    """The record of an ended episode, in pieces, the last with the digest of the whole."""
    data = record(episode)
    for start in range(0, len(data), PIECE_BYTES):
        last = start + PIECE_BYTES >= len(data)
        digest = hashlib.sha256(data).hexdigest() if last else ""
        yield pb.EpisodeChunk(data=data[start : start + PIECE_BYTES], last=last, digest=digest)


def record(episode: Episode) -> bytes:
    """The record of an ended episode. Equal bytes for equal episodes."""
    table = row(episode).replace_schema_metadata({METADATA: json.dumps(_about(episode), sort_keys=True).encode()})
    return _stream(table) + _stream(_sequence(episode))


def outcome_of(episode: Episode) -> Outcome:
    """Outcome by the client's word and the finish of the last turn, or as the environment of a hosted episode found it.

    A hosted one that was ended before it was over is ABORTED.
    """
    if episode.ended is not None and episode.ended.aborted:
        return Outcome.ABORTED
    if episode.hosted is not None:
        return Outcome.ABORTED if episode.hosted.final is None else Outcome(episode.hosted.final.end.outcome)
    finish = episode.turns[-1].finish if episode.turns else None
    return _OUTCOMES.get(finish, Outcome.COMPLETED)


def row(episode: Episode) -> pa.Table:
    """The row of EPISODES of an episode that was ended, or is over."""
    labels, outcome, final = episode.labels or {}, outcome_of(episode), _final_of(episode)
    replies = replies_of(episode)
    values: dict[str, Any] = {
        "episode_id": episode.identity,
        "group_id": episode.group_id,
        "task_id": labels.get("task_id", ""),
        "task_digest": labels.get("task_digest", ""),
        "image_digest": labels.get("image_digest", ""),
        "sample": 0,
        "attempt": 0,
        "seed": int(np.uint64(episode.sampling.seed).astype(np.int64)),  # the column is signed
        "policy_version": episode.version,
        "temperature": episode.sampling.temperature,
        "max_tokens": episode.sampling.max_tokens,
        "outcome": outcome.value,
        "failure": final.end.failure if outcome is Outcome.FAILED else None,
        "turns": len(episode.turns),
        "tool_calls": [vars(call) for call in call_records(replies)],
        "format_errors": sum(bool(reply.format_error) for reply in replies),
        "policy_tokens": sum(turn.tokens for turn in episode.turns) - sum(episode.forced),
        "final_state": [{"kind": final.kind, "digest": sha256(final.state)}],
        "final_diff": final.state,
    }
    return pa.Table.from_pylist([values], schema=EPISODES)


def replies_of(episode: Episode) -> list[pb.StepEnd]:
    """What the environment of a hosted episode replied to each turn; none of another episode."""
    replies = [turn.reply for turn in episode.turns if turn.reply is not None]
    ungraded = episode.hosted is not None and episode.hosted.final is not None and not episode.is_settled
    return [*replies, _final_of(episode).end] if ungraded else replies


def _final_of(episode: Episode) -> Final:
    """The final state; the empty diff where there is none."""
    found = None if episode.hosted is None else episode.hosted.final
    return found or Final(pb.StepEnd(), b"", "diff")


def _about(episode: Episode) -> dict[str, Any]:
    said = episode.ended or pb.EndEpisodeRequest()
    about: dict[str, Any] = {
        "aborted": said.aborted,
        "components": dict(said.components),
        "labels": episode.labels or {},
        "reward": said.reward if said.HasField("reward") else None,
        "rule": "FOLLOW" if episode.rule == pb.FOLLOW else "PINNED",
    }
    reply = next(iter(replies_of(episode)[-1:]), None)
    if reply is not None:
        about["verdict"] = reply.verdict
        about["failure"] = reply.failure
        about["components"] |= dict(reply.components)
        about["reward"] = reply.reward if reply.HasField("reward") else None
    return about


def _sequence(episode: Episode) -> pa.Table:
    ids = np.frombuffer(bytes(episode.ids), "<i4")
    sampled = np.frombuffer(bytes(episode.logprobs), "<f4")
    roles = np.full(len(ids), TokenRole.ENVIRONMENT, np.uint8)
    roles[: episode.turns[0].begin if episode.turns else len(ids)] = TokenRole.PROMPT
    logprobs = np.zeros(len(ids), np.float32)
    every = None if episode.supports is None else episode.supports.supports()
    forced, supports = np.frombuffer(bytes(episode.forced), np.bool_), SupportsWriter()
    spans = []
    for turn in episode.turns:
        made = slice(turn.first, turn.first + turn.tokens)
        own = slice(turn.logprob, turn.logprob + turn.tokens)
        roles[made] = TokenRole.POLICY
        logprobs[made] = sampled[own]
        if every is not None:
            roles[made][forced[own]] = TokenRole.FORCED
            supports.add(None, turn.first - len(supports))
            supports.extend(every.between(own.start, own.stop))
        spans += [
            {"version": version, "start": turn.first + first, "end": turn.first + end}
            for version, first, end in turn.spans
        ]
    columns = [
        pa.array([episode.identity], pa.string()),
        pa.array([0], pa.int32()),
        _one_list(pa.array(ids)),
        _one_list(pa.array(roles)),
        _one_list(pa.array(logprobs, mask=roles != TokenRole.POLICY)),
        pa.array([spans], SEQUENCES.field("policy_spans").type),
    ]
    if every is None:
        return pa.Table.from_arrays(columns, schema=SEQUENCES)
    supports.add(None, len(ids) - len(supports))
    columns.append(pa.array([encode_supports(supports.supports()) if len(every.numbers) else None], SUPPORTS.type))
    return pa.Table.from_arrays(columns, schema=SEQUENCES.append(SUPPORTS))


def _one_list(values: pa.Array) -> pa.ListArray:
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


def _stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]
