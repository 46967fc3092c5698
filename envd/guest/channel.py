"""Asks multiplexed over one stream: bounded in memory, in time and in what the other end may send.

    ask -> frame out          frame in -> the future of its id -> ask's answer

One object a sandbox and no task, lock or buffer of its own while it is idle: a server holds thousands.
"""

from __future__ import annotations

import asyncio
import errno
import os
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from envd.errors import SandboxGone
from envd.guest.escape import Escape
from envd.guest.protocol import CHUNK, HEAD, MAX_FRAME, Answer, Ask, ProtocolError
from envd.guest.waiting import MAX_WORDS, Waiting, fail, read_error, wake

T = TypeVar("T")
_MAX_OUTSTANDING = 4096
_MAX_QUEUED, _MAX_QUEUED_BYTES = 256, 4 * CHUNK
"""Parts of a watch that wait for their reader, and their bytes; more are dropped."""
_LATE = 16 * 1024 * 1024
"""Bytes of answer that may be under way when an ask is cancelled."""
_SMALL = 4 * MAX_WORDS
"""Bytes that any answer may have: an error's words are among them."""
_PART, _OK, _ERROR = int(Answer.PART), int(Answer.OK), int(Answer.ERROR)


class Channel(asyncio.Protocol):
    """One end of a stream whose other end is an agent.

    patience_s: how long an answer may take beyond what its ask waits for, before the agent counts as hung.
    escaped: the stream may have been cut in the middle of a frame; start it anew (`Escape`).
    """

    def __init__(self, patience_s: float, *, escaped: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._patience_s = patience_s
        self._asks: dict[int, Waiting] = {}
        self._last_id = 0
        self._escape = Escape() if escaped else None
        self._pending = bytearray()
        self._wanted = HEAD.size
        self._transports: list[asyncio.BaseTransport] = []
        self._writer: asyncio.WriteTransport | None = None
        self._writable: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._held = False
        self._reason: str | None = None
        self._ended = asyncio.Event()

    # The ask's side

    async def ask(
        self,
        kind: Ask,
        fields: bytes,
        *,
        bound: int = 0,
        wait_s: float = 0.0,
        parts: list[bytes] | None = None,
        identity: int | None = None,
    ) -> bytes:
        """Ask and return the OK's fields.

        `bound`: bytes that the answer and its parts may have; parts are appended to `parts`.

        Raises OSError with the guest's errno, EMSGSIZE for fields that are too large, SandboxGone. A cancelled ask is
        cancelled in the guest too.
        """
        identity, waiting = self._open(len(fields), bound, wait_s, parts, identity)
        try:
            if self._writable is not None:
                await self._drained()
            self._send(kind, fields, identity, waiting)
            return await waiting.future
        except asyncio.CancelledError:
            self._abandon(identity)
            raise

    async def ask_in_pieces(self, kind: Ask, pieces: list[bytes]) -> bytes:
        """Ask by several frames of one id, each after the answer to the one before.

        Returns the last answer's fields.
        """
        identity, body = self._fresh_id(), b""
        for fields in pieces:
            body = await self.ask(kind, fields, identity=identity)
        return body

    async def ask_for_nothing(self, kind: Ask, fields: bytes) -> None:
        """Ask for what is answered by an empty OK."""
        if await self.ask(kind, fields):
            self.broken("fields where none belong")

    def parsed(self, parse: Callable[..., T], *arguments: Any) -> T:
        """Take an answer apart; where it does not fit, the stream ends and SandboxGone is raised."""
        try:
            return parse(*arguments)
        except (ProtocolError, struct.error) as error:
            self.broken(str(error))

    def broken(self, how: str) -> NoReturn:
        """The guest broke the protocol: close, and raise SandboxGone."""
        self.end(f"the sandbox's agent broke the protocol ({how})")
        raise SandboxGone(self._reason or how)

    def open_stream(self, kind: Ask, fields: bytes) -> tuple[int, Waiting]:
        """Ask for what answers by parts without end; read them by `next_part`, end it by `close_stream`."""
        identity, waiting = self._open(len(fields), CHUNK, float("inf"), None, None)
        waiting.queue = deque()
        self._send(kind, fields, identity, waiting)
        return identity, waiting

    async def next_part(self, waiting: Waiting) -> bytes | None:
        """The next part; None where parts were dropped because nobody read them.

        Raises as `ask` does, EPIPE where the guest ended it.
        """
        assert waiting.queue is not None
        while not waiting.queue:
            if waiting.lost:
                waiting.lost = False
                return None
            if waiting.future.done():
                waiting.future.result()
                raise OSError(32, os.strerror(32))
            waiting.wake = self._loop.create_future()
            await waiting.wake
        part = waiting.queue.popleft()
        waiting.queued -= len(part)
        return part

    def close_stream(self, identity: int) -> None:
        """End what `open_stream` began."""
        if identity in self._asks:
            self._abandon(identity)

    @property
    def reason(self) -> str | None:
        """Why the stream ended; None while it lives."""
        return self._reason

    def hold(self) -> None:
        """Be patient without end: the guest is stopped."""
        self._held = True

    def release(self) -> None:
        """Be patient anew: the guest runs again."""
        self._held = False
        now = self._loop.time()
        for waiting in self._asks.values():
            waiting.due = max(waiting.due, now + self._patience_s)
        self._watch_time()

    def end(self, reason: str) -> None:
        """Close the stream: every ask raises SandboxGone with the reason."""
        if self._reason is None:
            self._reason = reason
            asks, self._asks = self._asks, {}
            for waiting in asks.values():
                fail(waiting, SandboxGone(reason))
            self._pending = bytearray()
            if self._timer is not None:
                self._timer.cancel()
            if self._writable is not None and not self._writable.done():
                self._writable.set_result(None)
        for transport in self._transports:
            if not transport.is_closing():  # asyncio's pipes do not bear it twice
                try:
                    # close() would wait for a guest that does not read
                    getattr(transport, "abort", transport.close)()
                except NotImplementedError:
                    transport.close()  # uvloop's reading half of a pipe
        if not self._transports:
            self._ended.set()

    async def ended(self) -> None:
        """Wait until the stream is closed at this end."""
        await self._ended.wait()

    def _open(
        self, size: int, bound: int, wait_s: float, parts: list[bytes] | None, identity: int | None
    ) -> tuple[int, Waiting]:
        if self._reason is not None:
            raise SandboxGone(self._reason)
        if size + HEAD.size - 4 > MAX_FRAME:  # the agent would end the stream
            raise OSError(errno.EMSGSIZE, f"a request of {size} bytes is larger than {MAX_FRAME}")
        if len(self._asks) >= _MAX_OUTSTANDING:
            raise OSError(11, f"the sandbox has {_MAX_OUTSTANDING} outstanding requests: wait for their replies")
        identity = identity or self._fresh_id()
        due = self._loop.time() + wait_s + self._patience_s
        waiting = Waiting(self._loop.create_future(), bound + _SMALL, due, parts)
        self._asks[identity] = waiting
        if self._timer is None or due < self._timer.when():
            self._watch_time()
        return identity, waiting

    def _fresh_id(self) -> int:
        identity = self._last_id % 0xFFFFFFFF + 1
        while identity in self._asks:
            identity = identity % 0xFFFFFFFF + 1
        self._last_id = identity
        return identity

    def _send(self, kind: Ask, fields: bytes, identity: int, waiting: Waiting) -> None:
        if self._writer is not None and self._reason is None:
            frame = HEAD.pack(len(fields) + 5, identity, kind) + fields
            self._writer.write(frame if self._escape is None else self._escape.encode(frame))
            waiting.sent = True

    async def _drained(self) -> None:
        """Wait until the guest has read what was sent; a stopped or hostile one must not fill our memory."""
        while self._writable is not None and self._reason is None:
            await asyncio.shield(self._writable)

    def _abandon(self, identity: int) -> None:
        """Nobody waits any more. The id stays known until the guest has answered, so that a late answer is no fault."""
        waiting = self._asks.get(identity)
        if waiting is None:
            return
        if waiting.future.done() and not waiting.future.cancelled():
            waiting.future.exception()
        waiting.future.cancel()
        if not waiting.sent:
            del self._asks[identity]
            return
        waiting.queue = None
        waiting.bound += _LATE
        waiting.due = self._loop.time() + self._patience_s
        cancelling = self._fresh_id()
        self._asks[cancelling] = nobody = Waiting(self._loop.create_future(), _SMALL, waiting.due, None)
        nobody.future.cancel()
        self._send(Ask.CANCEL, identity.to_bytes(4, "little"), cancelling, nobody)
        self._watch_time()

    # Time

    def _watch_time(self) -> None:
        """One timer for all asks; none while nothing is outstanding."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = min((each.due for each in self._asks.values()), default=float("inf"))
        if due != float("inf") and not self._held and self._reason is None:
            self._timer = self._loop.call_at(due, self._look_at_time)

    def _look_at_time(self) -> None:
        self._timer = None
        now = self._loop.time()
        if any(each.due <= now for each in self._asks.values()) and not self._held:
            self.end("the sandbox hangs: its agent did not answer in time")
        else:
            self._watch_time()

    # The stream's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The event loop has the stream, or the half of it that is read."""
        self._transports.append(transport)

    def write_to(self, transport: asyncio.WriteTransport) -> None:
        """Send asks there."""
        self._writer = transport
        if transport not in self._transports:
            self._transports.append(transport)
        if self._escape is not None:
            transport.write(self._escape.reset)

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end has gone, or this one closed."""
        self.end("the sandbox ended: it used up a limit, crashed or was destroyed")
        self._ended.set()

    def pause_writing(self) -> None:
        """The guest does not read."""
        if self._writable is None:
            self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        """The guest reads again."""
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Take frames apart and hand them out."""
        try:
            if self._escape is not None:
                data = self._escape.decode(data)
            if self._pending:
                self._pending += data
                if len(self._pending) < self._wanted:
                    return
                data, self._pending = bytes(self._pending), bytearray()
            self._take(data)
        except ProtocolError as error:
            self.end(f"the sandbox's agent broke the protocol ({error})")

    def _take(self, data: bytes) -> None:
        at, size = 0, len(data)
        self._wanted = HEAD.size
        while size - at >= HEAD.size:
            length, identity, kind = HEAD.unpack_from(data, at)
            end = at + 4 + length
            if length < 5 or length > MAX_FRAME:
                raise ProtocolError(f"a frame of {length} bytes")
            waiting = self._asks.get(identity)
            if waiting is None:
                raise ProtocolError("a reply without a request")
            if length > waiting.bound:
                raise ProtocolError("a reply larger than requested")
            if end > size:
                self._wanted = end - at
                break
            self._hand_out(identity, waiting, kind, data[at + HEAD.size : end])
            if self._reason is not None:
                return
            at = end
        if at < size:
            self._pending += data[at:]

    def _hand_out(self, identity: int, waiting: Waiting, kind: int, body: bytes) -> None:
        future = waiting.future
        if kind == _OK:
            del self._asks[identity]
            if not future.done():
                future.set_result(body)
                wake(waiting)
        elif kind == _ERROR:
            error = read_error(body)
            del self._asks[identity]
            if not future.done():
                fail(waiting, error)
        elif kind == _PART and waiting.queue is not None:
            if len(body) > waiting.bound:
                raise ProtocolError("a part exceeds the maximum size")
            if len(waiting.queue) < _MAX_QUEUED and waiting.queued + len(body) <= _MAX_QUEUED_BYTES:
                waiting.queue.append(body)
                waiting.queued += len(body)
            else:
                waiting.lost = True
            wake(waiting)
        elif kind == _PART and (waiting.parts is not None or future.done()):
            waiting.bound -= len(body) + HEAD.size
            if waiting.parts is not None and not future.done():
                waiting.parts.append(body)
        else:
            raise ProtocolError(f"a reply of kind {kind} matches no request")
