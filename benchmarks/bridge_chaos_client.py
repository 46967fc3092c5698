"""Client of the `bridge-chaos` benchmark: `python -m benchmarks.bridge_chaos_client RUN ADDRESS LOG PART PARTS`.

Plays the episodes PART, PART + PARTS, ... up to a number that each line of its input raises, and answers a line
`{"done": n}` whenever one has ended. Killed and started again it goes on where its log ends. Meanwhile it repeats,
reorders and delays calls about its own episodes; the line `call` makes it do one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.bridge_chaos_hosted import TASK, executions
from benchmarks.bridge_chaos_play import Log, Seen, following, identity, is_hosted, prompt_of
from benchmarks.processes import die_with_parent
from contracts.pb import bridge_pb2 as pb
from contracts.pb import bridge_pb2_grpc as rpc
from contracts.rpc.connecting import ERROR_NAME
from inference.bridge.client import BridgeClient, BridgeError, Episode, Sampling, Turn
from inference.bridge.errors import EpisodeEnded

WIDTH = 32
"""Episodes that one client plays at the same time."""
_EXPECTED = {"WrongStep", "UnknownEpisode", "EpisodeEnded", "EpisodeConflict", "Draining"}
"""Errors that a stray call may meet."""
_CUT = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL}
"""Statuses that gRPC itself gives to calls whose connection was cut; an error of the bridge has a name."""
_CALL_S = 5.0
_FAR = 1000
_QUICK = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 100)]


class Player:
    """Plays one client's episodes."""

    def __init__(self, run: str, client: BridgeClient, log: Log, seen: Seen) -> None:
        self._run, self._client, self._log, self._seen = run, client, log, seen
        self._room = asyncio.Semaphore(WIDTH)
        self.playing: dict[int, Episode] = {}

    async def play(self, number: int) -> None:
        """Play an episode to its end, from wherever it is."""
        async with self._room:
            if number in self._seen.done:
                return
            self._log.done(number, await self._played(number))
            print(json.dumps({"done": number}), flush=True)

    async def _played(self, number: int) -> Mapping[str, int] | None:
        try:
            episode = await self._open(number)
        except EpisodeEnded:  # the last client was killed before it could note the end
            return None
        self.playing[number] = episode
        while (asked := _asked(episode, episode.turns)) is not None:
            observation, sampling = asked
            step = len(episode.turns) + 1
            async for piece in episode.stream_step(observation, sampling=sampling):
                self._log.piece(number, step, piece.first, piece.token_ids.tobytes(), piece.logprobs.tobytes())
            self._log.turn(number, episode.turns[-1])
        await episode.check()
        del self.playing[number]
        record = await episode.end(reward=None if episode.hosted else float(number))
        return executions(record) if episode.hosted else {}

    async def _open(self, number: int) -> Episode:
        name, turns = identity(self._run, number), self._seen.turns.get(number, [])
        hosted, prompt = is_hosted(number), prompt_of(number)
        if turns:
            return await self._client.attach(name, () if hosted else prompt, turns)
        try:
            if hosted:
                return await self._client.start_task(TASK.task_id, seed=number, episode_id=name)
            return await self._client.start(prompt, sampling=Sampling(seed=number), episode_id=name)
        except EpisodeEnded:
            raise
        except BridgeError:  # it has begun its first turn already
            return await self._client.attach(name, () if hosted else prompt)


class Stray:
    """Calls that a network repeats, reorders and delays: none may change an episode."""

    def __init__(self, player: Player, stub: Any) -> None:
        self._player, self._stub = player, stub
        self.wrong: list[str] = []
        """Replies that are wrong for these calls."""

    async def call(self) -> None:
        """Make one call about an episode that is played now."""
        live = list(self._player.playing.values())
        if not live:
            return
        episode = random.choice(live)
        begun = ["repeat", "cancel", *(["late"] if len(episode.turns) > 1 else [])] if episode.turns else []
        kind = random.choice(["start", "early", *begun])
        try:
            await asyncio.wait_for(getattr(self, f"_{kind}")(episode), _CALL_S)
        except TimeoutError:
            return
        except grpc.aio.AioRpcError as error:
            name = str(dict(error.trailing_metadata() or ()).get(ERROR_NAME, ""))
            if not name and error.code() in _CUT:
                return
            if name not in _EXPECTED:
                self.wrong.append(f"{kind}: {error.code().name} {name}: {error.details()}")
        print(json.dumps({"answered": kind}), flush=True)

    async def _start(self, episode: Episode) -> None:
        """The start again, with other content."""
        await self._stub.StartEpisode(pb.StartEpisodeRequest(episode_id=episode.id, prompt_ids=b"\1\0\0\0"))
        self.wrong.append("start: another start with the same id was accepted")

    async def _repeat(self, episode: Episode) -> None:
        """The last turn again: it must be what it was."""
        turn = episode.turns[-1]
        asked = _asked(episode, episode.turns[:-1])
        assert asked is not None
        sampling = None if asked[1] is None else asked[1].message(0)
        observation = b"" if episode.hosted else turn.observation_ids.tobytes()
        request = self._request(episode, turn.step, observation, sampling)
        ids = b""
        async for event in self._stub.Step(request):
            ids += event.tokens.ids
        if ids != turn.token_ids.tobytes():
            self.wrong.append(f"repeat: step {turn.step} of {episode.id} is another one")

    async def _late(self, episode: Episode) -> None:
        """A step from long ago."""
        async for _ in self._stub.Step(self._request(episode, len(episode.turns) - 1, b"", None)):
            self.wrong.append("late: a step from before the last one was answered")

    async def _early(self, episode: Episode) -> None:
        """A step whose number is wrong now and when a delayed call arrives."""
        async for _ in self._stub.Step(self._request(episode, len(episode.turns) + _FAR, b"", None)):
            self.wrong.append("early: a step that is not due was answered")

    async def _cancel(self, episode: Episode) -> None:
        """The cancellation of a turn that has ended."""
        await self._stub.CancelStep(pb.StepName(episode_id=episode.id, step=len(episode.turns)))

    def _request(self, episode: Episode, step: int, observation: bytes, sampling: pb.Sampling | None) -> pb.StepRequest:
        return pb.StepRequest(episode_id=episode.id, step=step, observation_ids=observation, sampling=sampling)


def _asked(episode: Episode, turns: Sequence[Turn]) -> tuple[list[int], Sampling | None] | None:
    """Observation and sampling of the step after `turns`; None if the episode is over."""
    if episode.hosted:
        return None if turns and turns[-1].reply is not None and turns[-1].reply.done else ([], None)
    number = int(episode.id.rpartition("-")[2])
    asked = following(number, turns)
    return None if asked is None else (asked[0], Sampling(max_tokens=asked[1], seed=number))


async def _main(run: str, address: str, file: Path, part: int, parts: int) -> None:
    seen = Seen(file)
    log, tasks = Log(file), set[asyncio.Task[Any]]()
    allowed = part
    async with BridgeClient(address) as client, grpc.aio.insecure_channel(address, options=_QUICK) as channel:
        player = Player(run, client, log, seen)
        stray = Stray(player, rpc.BridgeStub(channel))  # type: ignore[no-untyped-call]
        print(json.dumps({"ready": True}), flush=True)
        while (line := await asyncio.to_thread(sys.stdin.readline)) not in ("", "end\n"):
            if line == "call\n":
                tasks.add(asyncio.create_task(stray.call()))
                continue
            for number in range(allowed, int(line), parts):
                tasks.add(asyncio.create_task(player.play(number)))
                allowed = number + parts
            for task in [each for each in tasks if each.done()]:
                task.result()
                tasks.discard(task)
        for task in tasks:
            await task
    print(json.dumps({"wrong": stray.wrong}), flush=True)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    np.seterr(all="raise")
    asyncio.run(_main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])))
