"""Commands of a Connect stream, and who waits for their answers.

A command makes its message whenever it is sent: the first time, and again after a lost connection.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any, Protocol

from contracts import tracing
from contracts.pb import bridge_pb2 as pb
from inference.bridge.client.errors import RecordCorrupt
from inference.bridge.client.received import Received
from inference.bridge.client.tokens import Record, Turn
from inference.errors import InferenceError

ALL = 1 << 62
"""More tokens than any turn has."""


class Command(Protocol):
    """One command, until it is answered or has failed."""

    def message(self, identity: int) -> pb.Command:
        """What is sent now."""

    def take(self, event: pb.Event) -> bool:
        """Take an answer, and return whether it was the last. Raises InferenceError for one that can't be right."""

    def fail(self, error: InferenceError) -> None:
        """There will be no more answers."""


class Ask:
    """A command with one answer: start or renew."""

    def __init__(self, **what: Any) -> None:
        self._what = what
        self.answer: asyncio.Future[pb.Event] = asyncio.get_running_loop().create_future()

    def message(self, identity: int) -> pb.Command:
        """See Command."""
        return pb.Command(id=identity, **self._what)

    def take(self, event: pb.Event) -> bool:
        """See Command."""
        if not self.answer.done():
            self.answer.set_result(event)
        return True

    def fail(self, error: InferenceError) -> None:
        """See Command."""
        if not self.answer.done():
            self.answer.set_exception(error)


class End:
    """The end of an episode, answered by its record in pieces."""

    def __init__(self, request: pb.EndEpisodeRequest) -> None:
        self._request = request
        self._pieces: list[bytes] = []
        self.record: asyncio.Future[Record] = asyncio.get_running_loop().create_future()

    def message(self, identity: int) -> pb.Command:
        """See Command."""
        self._pieces.clear()
        return pb.Command(id=identity, end=self._request)

    def take(self, event: pb.Event) -> bool:
        """See Command."""
        self._pieces.append(event.chunk.data)
        if not event.chunk.last:
            return False
        data, name = b"".join(self._pieces), self._request.episode_id
        found = hashlib.sha256(data).hexdigest()
        if found != event.chunk.digest:
            raise RecordCorrupt(
                f"the record of episode {name} has digest {found}, not {event.chunk.digest} as sent: end it again"
            )
        if not self.record.done():
            self.record.set_result(Record(name, data, found))
        return True

    def fail(self, error: InferenceError) -> None:
        """See Command."""
        if not self.record.done():
            self.record.set_exception(error)


class Step:
    """One turn of an episode. Belongs to the episode, not to the caller that waits for it."""

    __slots__ = (
        *("_hosted", "_over", "_request", "_traceparent", "_waiter", "_wanted"),
        *("cancelled", "error", "received", "sent", "turn"),
    )

    def __init__(
        self, request: pb.StepRequest, received: Received, over: Callable[[Step], None], *, hosted: bool
    ) -> None:
        """over: is called once, when the turn has ended or failed. hosted: whether its end has a reply."""
        self._hosted = hosted
        self._request, self._over = request, over
        self._traceparent = tracing.carrier().get("traceparent", "")
        self.received = received
        self.sent = False
        """Whether a bridge may know of it."""
        self.cancelled = False
        """Whether CancelStep follows wherever it is sent."""
        self.turn: Turn | None = None
        self.error: InferenceError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._wanted = ALL

    def message(self, identity: int) -> pb.Command:
        """See Command."""
        self.sent = True
        self._request.from_token = self.received.asked_from
        return pb.Command(id=identity, step=self._request, traceparent=self._traceparent)

    def cancel_message(self) -> pb.Command:
        """CancelStep of this turn; its answer interests nobody."""
        return pb.Command(cancel=pb.StepName(episode_id=self._request.episode_id, step=self._request.step))

    def take(self, event: pb.Event) -> bool:
        """See Command."""
        step = event.step
        if step.HasField("tokens"):
            self.received.add(step.tokens)
            if self.received.count > self._wanted:
                self._wake()
        if not step.HasField("end"):
            return False
        self.turn = self.received.turn(step.end, hosted=self._hosted)
        self._over(self)
        self._wake()
        return True

    def fail(self, error: InferenceError) -> None:
        """See Command."""
        self.error = error
        self._over(self)
        self._wake()

    async def wait(self, tokens: int = ALL) -> None:
        """Wait until there are more than `tokens` tokens, or the turn has ended. Raises its error.

        A cancelled wait changes nothing of the turn.
        """
        while self.turn is None and self.error is None and self.received.count <= tokens:
            self._wanted, self._waiter = tokens, asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._wanted, self._waiter = ALL, None
        if self.error is not None:
            raise self.error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
