"""What the journal says about episodes: its kinds of frames, and episodes made of them again."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from enum import IntEnum

from google.protobuf.message import DecodeError

from contracts.errors import SchemaError
from contracts.pb import bridge_pb2 as pb
from inference.bridge.checks import Limits, Sampling, sampling_of
from inference.bridge.episode import TOKEN_BYTES, Episode, Turn
from inference.bridge.errors import JournalError
from inference.bridge.hosted.state import Final, Hosted, Place, Sent
from inference.bridge.journal import Frame, Journal, frame, split

_START = struct.Struct("<HHd32s")
_TOKENS = struct.Struct("<IH")
_ID_TAG = b"\x0a"
_ANY = Limits(0, 0)
"""Messages in the journal were checked before they came there."""


class Kind(IntEnum):
    """Kinds of frames."""

    START = 1
    """Owner, version, granted lease in seconds, digest of the request, StartEpisodeRequest."""
    TURN = 2
    """StepRequest."""
    TOKENS = 3
    """Count and version of consecutive policy tokens, their ids, their logprobs, and `Episode.drawn` of them."""
    FINISH = 4
    """pb.Finish of the turn, one byte."""
    END = 5
    """EndEpisodeRequest."""
    FORGET = 6
    """The episode expired, or ended long ago."""
    PLACE = 7
    """Hosted: where the sandbox is, `hosted.state.Place`. The newest one counts."""
    CALLS = 8
    """Hosted: the last turn's calls may be sent from now on, `hosted.state.Sent`."""
    ANSWERS = 9
    """Hosted: results of those calls, a StepEnd."""
    FINAL = 10
    """Hosted: the episode is over, `hosted.state.Final`."""
    REPLY = 11
    """Hosted: the environment's reply to the last turn, a StepEnd."""


def start_payload(episode: Episode, start: pb.StartEpisodeRequest) -> bytes:
    """Payload of a START. A request with a grammar, of some 20 kB, is packed."""
    said = start.SerializeToString()
    who, what = episode.owner.encode(), episode.version.encode()
    fixed = _START.pack(len(who), len(what), episode.lease_s, episode.started_as)
    return fixed + who + what + (zlib.compress(said) if start.grammar else said)


def tokens_payload(version: str, ids: bytes, logprobs: bytes, drawn: bytes = b"") -> bytes:
    """Payload of a TOKENS."""
    name = version.encode()
    return _TOKENS.pack(len(ids) // TOKEN_BYTES, len(name)) + name + ids + logprobs + drawn


def snapshot(episode: Episode) -> Iterator[bytes]:
    """Frames that say everything about an episode."""

    def framed(kind: Kind, payload: bytes) -> bytes:
        return frame(kind, episode.handle, payload)

    start = pb.StartEpisodeRequest(
        episode_id=episode.identity,
        group_id=episode.group_id,
        prompt_ids=episode.prompt,
        rule=episode.rule,
        sampling=sampling_message(episode.sampling),
        labels=episode.labels or {},
    )
    if episode.restricted is not None:
        start.top_p, start.grammar = episode.restricted.top_p, episode.restricted.grammar or ""
    hosted = episode.hosted
    if hosted is not None:
        start.hosted.CopyFrom(pb.HostedTask(task_id=hosted.task_id, task_digest=hosted.task_digest))
    yield framed(Kind.START, start_payload(episode, start))
    if hosted is not None:
        yield framed(Kind.PLACE, hosted.place.payload())
    for index, turn in enumerate(episode.turns):
        step = pb.StepRequest(step=index + 1, observation_ids=episode.observation_of(turn))
        if turn.sampling is not None:
            step.sampling.CopyFrom(sampling_message(turn.sampling))
        yield framed(Kind.TURN, step.SerializeToString())
        yield from (framed(Kind.TOKENS, payload) for payload in _spans_of(episode, turn))
        if turn.finish is not None:
            yield framed(Kind.FINISH, bytes([turn.finish]))
        if turn.reply is not None:
            yield framed(Kind.REPLY, turn.reply.SerializeToString())
    if hosted is not None:
        yield from (framed(kind, payload) for kind, payload in _unfinished(hosted))
    if episode.ended is not None:
        yield framed(Kind.END, episode.ended.SerializeToString())


def replay(frames: Iterable[Frame]) -> dict[int, Episode]:
    """Episodes that the frames of a journal tell of, by handle. Frames of forgotten handles are skipped.

    Raises JournalError for frames that are whole and make no sense.
    """
    try:
        return _replay(frames)
    except (struct.error, zlib.error, SchemaError, DecodeError, ValueError, TypeError, IndexError) as error:
        raise JournalError(f"the journal has a frame that can't be read ({error}): move it away") from error


def _replay(frames: Iterable[Frame]) -> dict[int, Episode]:
    found: dict[int, Episode] = {}
    for each in frames:
        if each.kind == Journal.SNAPSHOT:
            found.pop(each.handle, None)
            for inner, _ in split(each.payload):
                _apply(found, inner)
        else:
            _apply(found, each)
    return found


def _apply(found: dict[int, Episode], each: Frame) -> None:
    if each.kind == Kind.START:
        found[each.handle] = _started(each)
        return
    episode = found.get(each.handle)
    if episode is None:
        return
    if each.kind == Kind.TURN:
        step = pb.StepRequest.FromString(each.payload)
        hosted = episode.hosted is not None
        sampling = sampling_of(step.sampling, _ANY, hosted=hosted) if step.HasField("sampling") else None
        episode.begin_turn(step.observation_ids, sampling)
    elif each.kind == Kind.TOKENS:
        count, named = _TOKENS.unpack_from(each.payload)
        ids = _TOKENS.size + named
        logprobs = ids + count * TOKEN_BYTES
        version = each.payload[_TOKENS.size : ids].decode()
        drawn = logprobs + count * TOKEN_BYTES
        parts = each.payload[ids:logprobs], each.payload[logprobs:drawn], each.payload[drawn:]
        episode.add_tokens(version, *parts)
    elif each.kind == Kind.FINISH:
        episode.turns[-1].finish = each.payload[0]
    elif each.kind == Kind.END:
        episode.ended = pb.EndEpisodeRequest.FromString(each.payload)
    elif each.kind == Kind.FORGET:
        del found[each.handle]
    elif episode.hosted is not None:
        _apply_hosted(episode, episode.hosted, each)


def _apply_hosted(episode: Episode, hosted: Hosted, each: Frame) -> None:
    if each.kind == Kind.PLACE:
        hosted.place = Place.of(each.payload)
    elif each.kind == Kind.CALLS:
        hosted.sent = Sent.of(each.payload)
    elif each.kind == Kind.ANSWERS:
        hosted.answers = pb.StepEnd.FromString(each.payload)
    elif each.kind == Kind.FINAL:
        hosted.final = Final.of(each.payload)
    elif each.kind == Kind.REPLY:
        episode.turns[-1].reply = pb.StepEnd.FromString(each.payload)
        hosted.replied()


def _started(each: Frame) -> Episode:
    who, what, lease_s, digest = _START.unpack_from(each.payload)
    owner = _START.size + who
    version = owner + what
    said = each.payload[version:]
    # a request begins with the tag of its id, what zlib packs with another byte
    start = pb.StartEpisodeRequest.FromString(said if said[:1] == _ID_TAG else zlib.decompress(said))
    episode = Episode(
        each.payload[_START.size : owner].decode(),
        start,
        sampling_of(start.sampling, _ANY, hosted=start.HasField("hosted")),
        each.payload[owner:version].decode(),
        lease_s,
        each.handle,
    )
    episode.started_as = digest
    return episode


def _unfinished(hosted: Hosted) -> Iterator[tuple[Kind, bytes]]:
    """Frames about the last turn of a hosted episode before its reply, and about its end."""
    if hosted.sent is not None:
        yield Kind.CALLS, hosted.sent.payload()
    if hosted.answers is not None:
        yield Kind.ANSWERS, hosted.answers.SerializeToString()
    if hosted.final is not None:
        yield Kind.FINAL, hosted.final.payload()


def _spans_of(episode: Episode, turn: Turn) -> Iterator[bytes]:
    for version, first, end in turn.spans:
        ids = slice((turn.first + first) * TOKEN_BYTES, (turn.first + end) * TOKEN_BYTES)
        logprobs = slice((turn.logprob + first) * TOKEN_BYTES, (turn.logprob + end) * TOKEN_BYTES)
        drawn = episode.drawn(turn.logprob + first, turn.logprob + end)
        tokens = bytes(memoryview(episode.ids)[ids]), bytes(memoryview(episode.logprobs)[logprobs])
        yield tokens_payload(version, *tokens, drawn)


def sampling_message(sampling: Sampling) -> pb.Sampling:
    """The message that `sampling_of` reads."""
    return pb.Sampling(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        stop_token_ids=sampling.stop_token_ids,
    )
