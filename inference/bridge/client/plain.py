"""The client without asyncio: the same calls, on an event loop in a thread of its own.

with Bridge("unix:/run/triplane/bridge.sock") as bridge:
    episodes = [bridge.start(prompt_ids, sampling=Sampling(max_tokens=512)) for _ in range(8)]
    turns = bridge.steps(episodes)
    records = [episode.end(reward=1.0) for episode in episodes]
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from inference.bridge.client.client import BridgeClient
from inference.bridge.client.episode import Episode
from inference.bridge.client.tokens import AnyIds, Ids, Info, Piece, Record, Sampling, Score, Turn

T = TypeVar("T")


class Bridge:
    """A `BridgeClient` for code that does not use asyncio. Takes the same arguments. May be used by several threads."""

    def __init__(self, address: str | None = None, **options: Any) -> None:
        """See BridgeClient."""
        self._client = BridgeClient(address, **options)
        self._thread = threading.Thread(target=self._work, name="bridge-client", daemon=True)
        self._running = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._stopping: asyncio.Event

    def __enter__(self) -> Self:
        self._thread.start()
        self._running.wait()
        try:
            self._wait(self._client.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._wait(self._client.__aexit__(kind, error, trace))
        finally:
            self._stop()

    def start(self, prompt_ids: AnyIds, **options: Any) -> PlainEpisode:
        """See BridgeClient.start."""
        return PlainEpisode(self, self._wait(self._client.start(prompt_ids, **options)))

    def start_task(self, task_id: str, **options: Any) -> PlainEpisode:
        """See BridgeClient.start_task."""
        return PlainEpisode(self, self._wait(self._client.start_task(task_id, **options)))

    def attach(self, episode_id: str, prompt_ids: AnyIds, turns: Sequence[Turn] = (), *, seed: int = 0) -> PlainEpisode:
        """See BridgeClient.attach."""
        return PlainEpisode(self, self._wait(self._client.attach(episode_id, prompt_ids, turns, seed=seed)))

    def steps(
        self, episodes: Sequence[PlainEpisode], observations: Sequence[AnyIds] | None = None, **options: Any
    ) -> list[Turn]:
        """One turn of each episode, all at the same time, in the order of `episodes`. observations: one an episode;
        None: all are empty. options: of `Episode.step`. Raises the first error; the other turns are cancelled.
        """
        if observations is None:
            observations = [()] * len(episodes)

        async def work(client: BridgeClient) -> list[Turn]:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(each.inner.step(seen, **options))
                    for each, seen in zip(episodes, observations, strict=True)
                ]
            return [task.result() for task in tasks]

        try:
            return self.run(work)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def run(self, work: Callable[[BridgeClient], Coroutine[Any, Any, T]]) -> T:
        """The result of a coroutine function that is given the asynchronous client, run on the loop of this one."""
        return self._wait(work(self._client))

    def score(self, token_ids: AnyIds, *, temperature: float = 1.0, version: str = "") -> Score:
        """See BridgeClient.score."""
        return self._wait(self._client.score(token_ids, temperature=temperature, version=version))

    def info(self) -> Info:
        """See BridgeClient.info."""
        return self._wait(self._client.info())

    def _wait(self, work: Awaitable[T]) -> T:
        """The result of work on the loop. An exception here, as KeyboardInterrupt, cancels it."""

        async def awaited() -> T:
            return await work

        future: Future[T] = asyncio.run_coroutine_threadsafe(awaited(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _work(self) -> None:
        """Body of the thread. The runner also ends what gRPC leaves behind."""

        async def until_stopped() -> None:
            self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
            self._running.set()
            await self._stopping.wait()

        asyncio.run(until_stopped())

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()


class PlainEpisode:
    """An `Episode` without asyncio. Leaving its `with` block ends it as that of `Episode` does."""

    def __init__(self, bridge: Bridge, inner: Episode) -> None:
        self._bridge = bridge
        self.inner = inner
        """The asynchronous episode, for `Bridge.run`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.inner.ended:
            self.end(aborted=not self.done)

    @property
    def done(self) -> bool:
        """See Episode.done."""
        return self.inner.done

    @property
    def id(self) -> str:
        """Its id."""
        return self.inner.id

    @property
    def turns(self) -> Sequence[Turn]:
        """Turns that have ended."""
        return self.inner.turns

    def step(self, observation_ids: AnyIds = (), *, sampling: Sampling | None = None, turn_s: float = 0.0) -> Turn:
        """See Episode.step. KeyboardInterrupt cancels the turn."""
        return self._bridge.run(lambda _: self.inner.step(observation_ids, sampling=sampling, turn_s=turn_s))

    def stream_step(
        self, observation_ids: AnyIds = (), *, sampling: Sampling | None = None, turn_s: float = 0.0
    ) -> Iterator[Piece]:
        """See Episode.stream_step."""
        pieces = self.inner.stream_step(observation_ids, sampling=sampling, turn_s=turn_s)

        async def following(_: BridgeClient) -> Piece | None:
            return await anext(pieces, None)

        async def closing(_: BridgeClient) -> None:
            await pieces.aclose()

        try:
            while (piece := self._bridge.run(following)) is not None:
                yield piece
        finally:
            self._bridge.run(closing)

    def end(
        self,
        reward: float | None = None,
        *,
        components: Mapping[str, float] | None = None,
        aborted: bool = False,
    ) -> Record:
        """See Episode.end."""
        return self._bridge.run(lambda _: self.inner.end(reward, components=components, aborted=aborted))

    def release(self) -> str:
        """See Episode.release."""

        async def work(_: BridgeClient) -> str:
            return self.inner.release()

        return self._bridge.run(work)

    def context(self) -> Ids:
        """See Episode.context."""
        return np.asarray(self.inner.context())
