"""The client against bridges that lose, repeat or change what they said, as the real one never does."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from contracts.pb import bridge_pb2 as pb
from inference.bridge.client import (
    BridgeClient,
    BridgeError,
    BridgeUnreachable,
    RecordCorrupt,
    Span,
    TokensChanged,
    link,
)
from inference.bridge.errors import EpisodeExpired
from tests.bridge.scripted_bridge import Cut, finished, looped, scripted, tokens

IDS = list(range(10, 60))


async def plain_step(command: pb.Command, stream: int) -> AsyncIterator[pb.Event]:
    """IDS from the token that is asked for."""
    if command.HasField("step"):
        yield tokens(command.step.from_token, IDS[command.step.from_token :])
        yield finished(len(IDS))
    elif command.HasField("end"):
        yield pb.Event(chunk=pb.EpisodeChunk(data=b"record", last=True, digest=hashlib.sha256(b"record").hexdigest()))


@looped
async def test_step_is_asked_again_from_where_it_was_lost(tmp_path: Path) -> None:
    async def answer(command: pb.Command, stream: int) -> AsyncIterator[pb.Event]:
        if not command.HasField("step"):
            async for event in plain_step(command, stream):
                yield event
            return
        begin = command.step.from_token
        yield tokens(begin, IDS[begin : 40 if stream == 1 else 50])
        if stream == 1:
            raise Cut
        yield finished(len(IDS))

    async with scripted(tmp_path, answer) as (bridge, address), BridgeClient(address) as client:
        episode = await client.start([1, 2])
        turn = await episode.step()
        assert turn.token_ids.tolist() == IDS
        assert turn.logprobs.tolist() == (-np.array(IDS, np.float32) / 8).tolist()
        assert turn.spans == (Span("v1", 0, 50),)
        again = bridge.commands[1][0].step
        assert again.from_token == 40 - 32  # all but the tokens that are compared
        assert again.episode_id == episode.id and again.step == 1


@looped
async def test_repeated_tokens_are_taken_once(tmp_path: Path) -> None:
    async def answer(command: pb.Command, stream: int) -> AsyncIterator[pb.Event]:
        if command.HasField("step"):
            yield tokens(0, IDS[:20])
            yield tokens(0, IDS[:20])
            yield tokens(10, IDS[10:30])
            yield tokens(30, IDS[30:], version="v2")
            yield finished(len(IDS))
            yield finished(len(IDS))
        else:
            async for event in plain_step(command, stream):
                yield event

    async with scripted(tmp_path, answer) as (_, address), BridgeClient(address) as client:
        turn = await (await client.start([1])).step()
        assert turn.token_ids.tolist() == IDS
        assert turn.spans == (Span("v1", 0, 30), Span("v2", 30, 50))


@pytest.mark.parametrize("changed", ["id", "logprob"])
@looped
async def test_changed_token_is_an_error_that_names_it(tmp_path: Path, changed: str) -> None:
    async def answer(command: pb.Command, stream: int) -> AsyncIterator[pb.Event]:
        if not command.HasField("step"):
            async for event in plain_step(command, stream):
                yield event
            return
        yield tokens(0, IDS[:20])
        if stream == 1:
            raise Cut
        event = tokens(0, [*IDS[:17], 99, *IDS[18:]])
        if changed == "logprob":
            event.step.tokens.ids = tokens(0, IDS).step.tokens.ids
        yield event
        yield finished(len(IDS))

    async with scripted(tmp_path, answer) as (_, address), BridgeClient(address) as client:
        episode = await client.start([1])
        with pytest.raises(TokensChanged, match=rf"step 1 of episode {episode.id}: token 17 was 27"):
            await episode.step()
        with pytest.raises(TokensChanged):
            await episode.step()
        assert episode.turns == []


@pytest.mark.parametrize("wrong", ["gap", "count"])
@looped
async def test_missing_tokens_are_an_error(tmp_path: Path, wrong: str) -> None:
    async def answer(command: pb.Command, stream: int) -> AsyncIterator[pb.Event]:
        if command.HasField("step"):
            yield tokens(3 if wrong == "gap" else 0, IDS[:20])
            yield finished(21)
        else:
            async for event in plain_step(command, stream):
                yield event

    async with scripted(tmp_path, answer) as (_, address), BridgeClient(address) as client:
        with pytest.raises(
            BridgeError, match="from token 3 on, after 0 tokens" if wrong == "gap" else "after 21 tokens"
        ):
            await (await client.start([1])).step()


@looped
async def test_record_with_another_digest_is_refused(tmp_path: Path) -> None:
    async def answer(command: pb.Command, stream: int) -> AsyncIterator[pb.Event]:
        yield pb.Event(chunk=pb.EpisodeChunk(data=b"reco", last=False))
        yield pb.Event(chunk=pb.EpisodeChunk(data=b"rd", last=True, digest="00"))

    async with scripted(tmp_path, answer) as (_, address), BridgeClient(address) as client:
        episode = await client.start([1])
        with pytest.raises(RecordCorrupt, match=episode.id):
            await episode.end()


@looped
async def test_cut_record_is_read_from_its_start(tmp_path: Path) -> None:
    async def answer(command: pb.Command, stream: int) -> AsyncIterator[pb.Event]:
        yield pb.Event(chunk=pb.EpisodeChunk(data=b"rec", last=False))
        if stream == 1:
            raise Cut
        digest = hashlib.sha256(b"record").hexdigest()
        yield pb.Event(chunk=pb.EpisodeChunk(data=b"ord", last=True, digest=digest))

    async with scripted(tmp_path, answer) as (_, address), BridgeClient(address) as client:
        assert (await (await client.start([1])).end()).data == b"record"


@looped
async def test_refusal_for_now_is_tried_again_and_another_is_raised_by_name(tmp_path: Path) -> None:
    asked: list[int] = []

    async def answer(command: pb.Command, stream: int) -> AsyncIterator[pb.Event]:
        if command.HasField("step"):
            asked.append(command.step.step)
            if command.step.step == 2:
                failure = pb.Failure(code=5, error="EpisodeExpired", message="the lease has ended")
            elif len(asked) < 3:
                failure = pb.Failure(code=14, error="Draining", message="ends soon")
            else:
                async for event in plain_step(command, stream):
                    yield event
                return
            yield pb.Event(failure=failure)
        else:
            async for event in plain_step(command, stream):
                yield event

    async with scripted(tmp_path, answer) as (_, address), BridgeClient(address) as client:
        episode = await client.start([1])
        await episode.step()
        assert asked == [1, 1, 1]
        with pytest.raises(EpisodeExpired, match="the lease has ended"):
            await episode.step()


@looped
async def test_no_more_steps_than_credits(tmp_path: Path) -> None:
    running, most = 0, 0
    go_on = asyncio.Event()

    async def answer(command: pb.Command, stream: int) -> AsyncIterator[pb.Event]:
        nonlocal running, most
        if command.HasField("step"):
            running += 1
            most = max(most, running)
            if running == 3:
                go_on.set()
            yield tokens(0, IDS[:1])
        else:
            async for event in plain_step(command, stream):
                yield event

    async with scripted(tmp_path, answer, credits=3) as (bridge, address), BridgeClient(address) as client:
        episodes = [await client.start([1]) for _ in range(7)]
        steps = [asyncio.create_task(each.step()) for each in episodes]
        await go_on.wait()
        await asyncio.sleep(0.05)
        assert most == 3
        # a step that was never sent is dropped, and the bridge is told nothing of it
        steps[6].cancel()
        with pytest.raises(asyncio.CancelledError):
            await steps[6]
        sent = [each.step.episode_id for each in bridge.commands[0] if each.HasField("step")]
        assert sent == [each.id for each in episodes[:3]]
        assert not any(each.HasField("cancel") for each in bridge.commands[0])
        for step in steps:
            step.cancel()
        await asyncio.gather(*steps, return_exceptions=True)


@looped
async def test_silent_stream_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "SILENCE_S", 0.2)

    async def answer(command: pb.Command, stream: int) -> AsyncIterator[pb.Event]:
        if command.HasField("step") and stream == 1:
            await asyncio.sleep(3600)
        async for event in plain_step(command, stream):
            yield event

    async with scripted(tmp_path, answer) as (bridge, address), BridgeClient(address) as client:
        turn = await (await client.start([1])).step()
        assert turn.token_ids.tolist() == IDS and bridge.streams == 2


@looped
async def test_bridge_that_does_not_answer_is_given_up_and_found_later(tmp_path: Path) -> None:
    async with BridgeClient(f"unix:{tmp_path / 's.sock'}", give_up_after_s=0.3) as client:
        with pytest.raises(BridgeUnreachable, match=r"s\.sock did not answer for 0\.3 s.*python -m inference bridge"):
            await client.start([1])
        with pytest.raises(BridgeUnreachable, match=r"UNAVAILABLE|DEADLINE_EXCEEDED"):
            await client.info()
        async with scripted(tmp_path, plain_step):
            client.link._give_up_after_s = 10
            async with await client.start([1]) as episode:
                assert (await episode.step()).token_ids.tolist() == IDS


@looped
async def test_step_that_was_given_up_goes_on_with_what_is_here(tmp_path: Path) -> None:
    lost = True

    async def answer(command: pb.Command, stream: int) -> AsyncIterator[pb.Event]:
        if command.HasField("step") and lost:
            yield tokens(command.step.from_token, IDS[command.step.from_token : 40])
            yield pb.Event(failure=pb.Failure(code=14, error="JournalError", message="disk full"))
            return
        async for event in plain_step(command, stream):
            yield event

    async with scripted(tmp_path, answer) as (bridge, address), BridgeClient(address, give_up_after_s=0.2) as client:
        episode = await client.start([1])
        with pytest.raises(BridgeError, match="disk full"):
            await episode.step()
        lost = False
        assert (await episode.step()).token_ids.tolist() == IDS
        assert bridge.commands[-1][-1].step.from_token == 8


@looped
async def test_bridge_that_only_greets_is_given_up(tmp_path: Path) -> None:
    async def answer(command: pb.Command, stream: int) -> AsyncIterator[pb.Event]:
        if command.HasField("step"):
            raise Cut
        async for event in plain_step(command, stream):
            yield event

    async with scripted(tmp_path, answer) as (bridge, address), BridgeClient(address, give_up_after_s=0.4) as client:
        episode = await client.start([1])
        with pytest.raises(BridgeUnreachable, match="cut"):
            await episode.step()
        assert bridge.streams > 2
