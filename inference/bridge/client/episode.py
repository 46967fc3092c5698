"""One episode of a client: steps, streams, its transcript, its end."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import Protocol, Self

import numpy as np

from contracts.pb import bridge_pb2 as pb
from inference.bridge.client.commands import End, Step
from inference.bridge.client.errors import TokensChanged
from inference.bridge.client.link import Link
from inference.bridge.client.received import Received
from inference.bridge.client.tokens import AnyIds, Ids, Piece, Record, Sampling, Turn, ids_bytes, ids_of
from inference.bridge.errors import BridgeError, EpisodeEnded, EpisodeExpired, UnknownEpisode
from inference.errors import InferenceError

_GONE = (EpisodeEnded, EpisodeExpired, UnknownEpisode)


class Client(Protocol):
    """What an episode needs of its client."""

    link: Link

    async def state(self, episode_id: str) -> pb.EpisodeState:
        """State of an episode at the bridge."""

    def let_go(self, episode: Episode) -> None:
        """Renew its lease no more."""


class Episode:
    """An episode of one `BridgeClient`. One step runs at a time.

    Leaving its `async with` block ends it, unless it was ended or released before: as aborted, unless it is hosted and
    over.
    """

    def __init__(
        self, client: Client, episode_id: str, version: str, prompt: bytes, seed: int, *, hosted: bool = False
    ) -> None:
        """version: policy at its start. prompt: little-endian int32. seed: of its sampling, where a step's names
        none. hosted: whether the bridge plays its environment.
        """
        self.hosted = hosted
        self.id = episode_id
        self.version = version
        """Policy version at its start; the one of all tokens if it is pinned."""
        self.prompt_ids = ids_of(prompt)
        """[n] tokens of the prompt, read-only."""
        self.turns: list[Turn] = []
        """Turns that have ended."""
        self.ended = False
        """Whether it was ended here, or given up with `release`."""
        self._client, self._seed = client, seed
        self._running: Step | None = None
        self._unfinished: Received | None = None
        """What is here of a turn that failed for this client, and may go on at the bridge."""
        self._broken: InferenceError | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.ended:
            await self.end(aborted=not self.done)

    @property
    def done(self) -> bool:
        """Whether the environment of a hosted episode has said that it is over; False for other episodes."""
        reply = self.turns[-1].reply if self.turns else None
        return reply is not None and reply.done

    async def step(
        self, observation_ids: AnyIds = (), *, sampling: Sampling | None = None, turn_s: float = 0.0
    ) -> Turn:
        """Append the environment's tokens and let the policy take one turn. Of a hosted episode the bridge appends
        them itself, and the turn comes with its reply.

        sampling: of this turn only. turn_s: ends the turn as DEADLINE; 0: no limit. Lost connections and restarts of
        the bridge are waited out. A cancelled call cancels the turn; it becomes the last of `turns`, and the episode
        goes on after it. Raises the bridge's errors, BridgeUnreachable and TokensChanged.
        """
        running = await self._begin(observation_ids, sampling, turn_s)
        try:
            await running.wait()
        except BaseException:
            self._abandon(running)
            raise
        assert running.turn is not None
        return running.turn

    async def stream_step(
        self, observation_ids: AnyIds = (), *, sampling: Sampling | None = None, turn_s: float = 0.0
    ) -> AsyncGenerator[Piece, None]:
        """As `step`, and yield the tokens as they come; afterwards the turn is the last of `turns`.

        Closing the generator cancels the turn.
        """
        running = await self._begin(observation_ids, sampling, turn_s)
        given = 0
        try:
            while True:
                await running.wait(given)
                if running.received.count > given:
                    piece = running.received.piece(given)
                    given = running.received.count
                    yield piece
                elif running.turn is not None:
                    return
        finally:
            self._abandon(running)

    async def cancel(self) -> Turn | None:
        """Cancel the turn that runs, and return it; None if none runs, or if it had not begun."""
        running = self._running
        if running is None:
            return None
        self._abandon(running)
        if self._running is None:
            return running.turn
        await running.wait()
        return running.turn

    async def end(
        self,
        reward: float | None = None,
        *,
        components: Mapping[str, float] | None = None,
        aborted: bool = False,
    ) -> Record:
        """End the episode and return its record, which keeps the rewards. A turn that runs is cancelled.

        Asked again it returns the same record, while the bridge keeps it. Raises the bridge's errors, BridgeUnreachable
        and RecordCorrupt.
        """
        if self._running is not None:
            self._abandon(self._running)
        request = pb.EndEpisodeRequest(episode_id=self.id, components=components, aborted=aborted)
        if reward is not None:
            request.reward = reward
        command = End(request)
        self.release()
        self._client.link.send(command)
        return await command.record

    def release(self) -> str:
        """Let go of the episode without ending it, and return its id: another client may attach to it until its lease
        ends.
        """
        self.ended = True
        self._client.let_go(self)
        return self.id

    async def state(self) -> pb.EpisodeState:
        """State of the episode at the bridge."""
        return await self._client.state(self.id)

    async def check(self) -> None:
        """Compare the transcript with the bridge's, while no step runs. Raises TokensChanged."""
        await self._settled()
        state = await self.state()
        if state.digest != self.digest():
            raise TokensChanged(
                f"episode {self.id}: the bridge has {state.steps} steps and {state.tokens} tokens with digest"
                f" {state.digest}, this client {len(self.turns)} and {len(self.context())} with {self.digest()}: abort"
                " the episode and start another one"
            )

    def context(self) -> Ids:
        """[n] all tokens of the turns that have ended: the prompt, and of each turn the observation and the policy's
        tokens. A cancelled turn ends a little later.
        """
        return np.concatenate(self._parts())

    def digest(self) -> str:
        """SHA-256 of the context as little-endian int32, in hex digits, as the bridge computes it."""
        found = hashlib.sha256()
        for part in self._parts():
            found.update(part.data)
        return found.hexdigest()

    def _parts(self) -> list[Ids]:
        return [self.prompt_ids, *(part for turn in self.turns for part in (turn.observation_ids, turn.token_ids))]

    async def _begin(self, observation_ids: AnyIds, sampling: Sampling | None, turn_s: float) -> Step:
        await self._settled()
        if self._broken is not None:
            raise self._broken
        if self.ended:
            raise EpisodeEnded(f"episode {self.id} was ended or released here: start another one, or attach to it")
        step, sent = len(self.turns) + 1, ids_bytes(observation_ids, "observation_ids")
        reply = self.turns[-1].reply if self.turns else None
        observation = sent if reply is None else reply.observation_ids.tobytes()
        received, self._unfinished = self._unfinished, None
        if received is None or received.observation != observation:
            received = Received(self.id, step, observation)
        request = pb.StepRequest(episode_id=self.id, step=step, observation_ids=sent, turn_s=turn_s)
        if sampling is not None:
            request.sampling.CopyFrom(sampling.message(self._seed))
        self._running = command = Step(request, received, self._over, hosted=self.hosted)
        self._client.link.send(command)
        return command

    async def _settled(self) -> None:
        """Wait for the end of a turn that was cancelled. Raises BridgeError if one runs that was not."""
        while (earlier := self._running) is not None:
            if not earlier.cancelled:
                raise BridgeError(f"a step of episode {self.id} runs already: wait for it, or cancel it")
            await earlier.wait()

    def _over(self, command: Step) -> None:
        """Take a turn that has ended, or keep what is here of one that failed."""
        self._running = None
        if command.turn is not None:
            self.turns.append(command.turn)
            return
        self._unfinished = command.received
        if isinstance(command.error, TokensChanged):
            self._broken = command.error
        elif isinstance(command.error, _GONE):
            self._client.let_go(self)

    def _abandon(self, running: Step) -> None:
        """Cancel a turn that has not ended."""
        if self._running is running and not running.cancelled and not self._client.link.cancel(running):
            running.fail(BridgeError(f"a step of episode {self.id} was cancelled before it began"))
