"""One Connect stream: commands about any number of episodes in, their answers out, in one task each.

    commands --read--> sessions: answers in order ------.
                       starts: when the engine replies -+--> events, one at a time, as fast as the client reads
                       readers of turns: woken ---------'

Answers wait in a queue of limited length, beyond which no command is read. Turns wait in no queue: what a slow client
has not read yet is taken from the episode, in one piece, when its turn comes. A start may wait for the engine, e.g.
while it loads a policy: commands about other episodes do not wait for it, those about its own do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial

from contracts import tracing
from contracts.errors import TriplaneError
from contracts.pb import bridge_pb2 as pb
from inference.bridge import record
from inference.bridge.calls import check_read, code_of, words_of
from inference.bridge.errors import BadMessage, BridgeError, TooManySteps
from inference.bridge.sessions import Sessions
from inference.bridge.turns import Subscription
from inference.errors import EngineStopped

MAX_ANSWERS = 64
"""Answers that wait to be read, beyond which no command is taken."""
_log = logging.getLogger(__name__)


class Connection:
    """One stream of one client."""

    def __init__(self, sessions: Sessions, owner: str, commands: AsyncIterator[pb.Command]) -> None:
        self._sessions, self._owner, self._commands = sessions, owner, commands
        self._answers: deque[Iterator[pb.Event]] = deque()
        self._ready: deque[tuple[int, Subscription]] = deque()
        """Turns with something to take, each once."""
        self._readers: dict[Subscription, int] = {}
        """Turns in flight, with the ids of their commands."""
        self._starting: dict[str, asyncio.Task[None]] = {}
        """By episode: its start, or the last command about it that waits for the start."""
        self._waiting = 0
        """Starts, and commands that wait for one."""
        self._wake, self._room = asyncio.Event(), asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def events(self) -> AsyncIterator[pb.Event]:
        """What the client is told, until it has closed its side and every turn of this stream has ended."""
        yield pb.Event(credits=self._sessions.bounds.credits)
        while True:
            while self._answers or self._ready:
                if self._answers:
                    for event in self._answers.popleft():
                        yield event
                    self._room.set()
                if self._ready:
                    event_of_turn = self._next()
                    if event_of_turn is not None:
                        yield event_of_turn
            if self._reading.done() and not self._readers:
                self._reading.result()
                return
            await self._wake.wait()
            self._wake.clear()

    def close(self) -> None:
        """Stop reading and let go of all turns, which go on."""
        self._reading.cancel()
        for reader in self._readers:
            self._sessions.leave(reader)

    def _next(self) -> pb.Event | None:
        """The next event of a turn."""
        identity, reader = self._ready.popleft()
        event = pb.Event(id=identity)
        try:
            filled = reader.take(event.step)
        except TriplaneError as error:
            self._drop(reader)
            return self._failed(identity, error)
        if not filled:
            return None
        if reader.done:
            self._drop(reader)
        else:
            self._ready.append((identity, reader))
        return event

    def _drop(self, reader: Subscription) -> None:
        del self._readers[reader]
        self._sessions.leave(reader)

    async def _read(self) -> None:
        try:
            async with asyncio.TaskGroup() as starts:
                async for command in self._commands:
                    while len(self._answers) >= MAX_ANSWERS or self._waiting >= self._sessions.bounds.credits:
                        self._room.clear()
                        await self._room.wait()
                    name = _episode_of(command)
                    if name in self._starting or (command is not None and command.HasField("start")):
                        self._waiting += 1
                        waiting = self._in_order(command, name, self._starting.get(name))
                        self._starting[name] = starts.create_task(waiting)
                    else:
                        with self._answering(command):
                            check_read(command)
                            self._obey(command)
        finally:
            self._wake.set()

    async def _in_order(self, command: pb.Command, name: str, before: asyncio.Task[None] | None) -> None:
        """Obey a command after another one about the same episode, whose name this is."""
        try:
            if before is not None:
                await asyncio.wait([before])
            with self._answering(command):
                if command.HasField("start"):
                    state = await self._sessions.start(self._owner, command.start)
                    self._answer(iter((pb.Event(id=command.id, state=state),)))
                else:
                    self._obey(command)
        finally:
            self._waiting -= 1
            if self._starting[name] is asyncio.current_task():
                del self._starting[name]
            self._room.set()

    @contextmanager
    def _answering(self, command: pb.Command | None) -> Iterator[None]:
        """Answer a command that fails, for whatever reason but the end of its stream."""
        try:
            yield
            return
        except TriplaneError as error:
            failure = error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            failure = EngineStopped(f"the engine cancelled the command: {error!r}")  # or a library that it uses
        except Exception as error:  # noqa: BLE001 (told to the client, and logged)
            _log.error("a command failed", exc_info=error)
            failure = BridgeError(f"the command failed, the log of the bridge says where: {error!r}")
        self._answer(iter((self._failed(0 if command is None else command.id, failure),)))

    def _obey(self, command: pb.Command) -> None:
        """Execute a command that is no start."""
        sessions, owner, identity = self._sessions, self._owner, command.id
        kind = command.WhichOneof("what")
        if kind == "step":
            if len(self._readers) >= sessions.bounds.credits:
                raise TooManySteps(
                    f"{len(self._readers)} steps run on this stream, as many as its credits: wait for one to end"
                )
            with tracing.joined({"traceparent": command.traceparent} if command.traceparent else {}):
                reader = sessions.step(owner, command.step, partial(self._woken, identity))
            self._readers[reader] = identity
        elif kind == "end":
            episode = sessions.end(owner, command.end)
            self._answer(pb.Event(id=identity, chunk=chunk) for chunk in record.chunks(episode))
        elif kind == "cancel":
            state = sessions.cancel(owner, command.cancel.episode_id, command.cancel.step)
            self._answer(iter((pb.Event(id=identity, state=state),)))
        elif kind == "renew":
            lost = sessions.renew(owner, [each for each in command.renew.episode_ids if each not in self._starting])
            self._answer(iter((pb.Event(id=identity, renewed=pb.RenewReply(lost=lost)),)))
        else:
            raise BadMessage("the command says nothing: set start, step, end, cancel or renew")

    def _answer(self, events: Iterator[pb.Event]) -> None:
        self._answers.append(events)
        self._wake.set()

    def _woken(self, identity: int, reader: Subscription) -> None:
        self._ready.append((identity, reader))
        self._wake.set()

    def _failed(self, identity: int, error: TriplaneError) -> pb.Event:
        code, _ = code_of(error).value
        self._sessions.counts.refused[type(error).__name__] += 1
        return pb.Event(id=identity, failure=pb.Failure(code=code, error=type(error).__name__, message=words_of(error)))


def _episode_of(command: pb.Command | None) -> str:
    """Id of the episode that a command is about; empty: of none, or of several."""
    kind = None if command is None else command.WhichOneof("what")
    return str(getattr(command, kind).episode_id) if kind in ("start", "step", "end", "cancel") else ""
