"""One Connect stream that is made again whenever it is lost, and the commands that are not answered yet.

    send --> pending --> written: steps while there are credits, everything else at once
                ^                                  |
                '-- failed for now, or stream lost |--> events --> command.take --> done

A stream is dialed when there is something to send. When it is lost, or silent for SILENCE_S though something is asked,
it is dialed again after a pause, and every pending command is sent again: all commands of the protocol are idempotent.
Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import grpc

from contracts.pb import bridge_pb2 as pb
from contracts.retries import backoff_s
from inference.bridge.client.commands import Command, Step
from inference.bridge.client.errors import TRANSIENT, error_of, raise_final, unreachable
from inference.bridge.errors import BridgeError
from inference.errors import InferenceError

SILENCE_S = 30.0
"""Seconds without a word from the bridge after which a stream counts as lost; it is asked for one after half of them.
"""
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
"""Pauses before a stream is dialed, or a command sent, again, in seconds."""
_PING = 0
"""Id of an empty Renew that only asks for a sign of life."""


class _Lost(Exception):
    """The stream has ended or is silent."""


class Link:
    """Sends commands and hands out their answers."""

    def __init__(self, connect: Callable[[], Any], address: str, give_up_after_s: float) -> None:
        """connect: makes a call of Connect. give_up_after_s: how long the bridge may be unreachable, or refuse a
        command for now, before commands fail.
        """
        self._connect, self._address, self._give_up_after_s = connect, address, give_up_after_s
        self._pending: dict[int, Command] = {}
        self._last = _PING
        self._refused: dict[int, tuple[int, float]] = {}
        """Pending commands that failed for now -> how often, and when first."""
        self._call: Any = None
        """The stream; None while there is none."""
        self._urgent: deque[int] = deque()
        """Pending commands to write, but steps."""
        self._steps: deque[int] = deque()
        """Pending steps to write when there are credits."""
        self._running: set[int] = set()
        """Steps that were written to this stream and have not ended."""
        self._cancels: deque[Step] = deque()
        self._credits = 0
        self._heard = 0.0
        self._useful = False
        """Whether the stream has answered anything. One that only greets, again and again, is given up like none."""
        self._wake, self._needed = asyncio.Event(), asyncio.Event()
        self._closed = False
        self._keeper = asyncio.create_task(self._keep())
        self._keeper.add_done_callback(self._kept)

    def send(self, command: Command) -> None:
        """Send a command now or when there is a stream. Raises BridgeError after `close`."""
        if self._closed:
            raise BridgeError("the client is closed: open another one")
        self._last += 1
        self._pending[self._last] = command
        if self._call is not None:
            self._enqueue(self._last, command)
        self._needed.set()

    def cancel(self, step: Step) -> bool:
        """Cancel a step. Returns whether the bridge may have begun it; if not, it is dropped here."""
        step.cancelled = True
        if not step.sent:
            for identity in [each for each, command in self._pending.items() if command is step]:
                del self._pending[identity]
            return False
        self._cancels.append(step)
        self._wake.set()
        return True

    async def close(self) -> None:
        """End the stream; pending commands fail. Turns at the bridge go on."""
        self._closed = True
        self._keeper.cancel()
        await asyncio.gather(self._keeper, return_exceptions=True)
        self._fail_all(BridgeError("the client was closed before the bridge answered"))

    async def _keep(self) -> None:
        """Keep a stream while there is something to send."""
        time_of, failures, deadline, reason = asyncio.get_running_loop().time, 0, math.inf, ""
        while True:
            while not self._pending:
                self._needed.clear()
                await self._needed.wait()
            if not failures:
                deadline, reason = time_of() + self._give_up_after_s, "no answer"
            try:
                async with asyncio.timeout_at(deadline) as limit:
                    reason = await self._stream(limit)
            except TimeoutError:
                pass
            except InferenceError as error:
                failures = 0
                self._fail_all(error)
                continue
            if self._useful:
                failures, deadline = 0, time_of() + self._give_up_after_s
            elif time_of() >= deadline:
                failures = 0
                self._fail_all(unreachable(self._address, self._give_up_after_s, reason))
                continue
            failures += 1
            await asyncio.sleep(backoff_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S))

    def _kept(self, keeper: asyncio.Task[None]) -> None:
        """Let nobody wait for a stream that a bug ended."""
        if not keeper.cancelled() and (error := keeper.exception()) is not None:
            self._closed = True
            self._fail_all(BridgeError(f"the client has failed, report it as a bug: {error!r}"))

    async def _stream(self, limit: asyncio.Timeout) -> str:
        """Use one stream until it is lost, and return why. Ends the time limit when the bridge answers.

        Raises InferenceError as `_reason`.
        """
        self._running.clear()
        self._urgent.clear()
        self._steps.clear()
        self._cancels.clear()
        self._credits, self._heard, self._useful = 0, time.monotonic(), False
        self._call = self._connect()
        for identity, command in self._pending.items():
            self._enqueue(identity, command)
        work: list[Coroutine[Any, Any, None]] = [self._read(limit), self._write(), self._watch()]
        tasks = [asyncio.ensure_future(each) for each in work]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return self._reason(tasks)
        finally:
            call, self._call = self._call, None
            call.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _reason(self, tasks: Sequence[asyncio.Future[None]]) -> str:
        """Why a stream was lost. Raises InferenceError for a bridge that another try will not find different."""
        # a task that gRPC cancelled: the bridge said CANCELLED
        errors = [error for task in tasks if task.done() and not task.cancelled() and (error := task.exception())]
        for error in errors:
            if not isinstance(error, (grpc.RpcError, asyncio.InvalidStateError, _Lost)):
                raise error
        status = next((error for error in errors if isinstance(error, grpc.aio.AioRpcError)), None)
        if status is None:
            return str(errors[0]) if errors else "CANCELLED"
        raise_final(status, self._address)
        return f"{status.code().name}: {status.details()}"

    async def _read(self, limit: asyncio.Timeout) -> None:
        read, pending = self._call.read, self._pending
        while (event := await read()) is not grpc.aio.EOF:
            self._heard = time.monotonic()
            if event.credits:
                limit.reschedule(None)
                self._credits = event.credits
                self._wake.set()
            command = pending.get(event.id)
            if command is not None:
                self._take(event, command)
            self._useful = self._useful or command is not None or not event.credits
        raise _Lost("the bridge closed the stream")

    def _take(self, event: pb.Event, command: Command) -> None:
        if event.WhichOneof("what") == "failure":
            self._failed(event.id, command, event.failure)
            return
        try:
            done = command.take(event)
        except InferenceError as error:
            command.fail(error)
            done = True
        if done:
            self._forget(event.id)

    def _failed(self, identity: int, command: Command, failure: pb.Failure) -> None:
        """Send a command again later, or let it fail."""
        count, since = self._refused.get(identity, (0, time.monotonic()))
        over = time.monotonic() - since > self._give_up_after_s
        if over or (failure.code not in TRANSIENT and failure.error not in TRANSIENT):
            self._forget(identity)
            command.fail(error_of(failure.error, failure.message))
            return
        self._refused[identity] = count + 1, since
        self._running.discard(identity)
        pause_s = backoff_s(count + 1, FIRST_PAUSE_S, LONGEST_PAUSE_S)
        asyncio.get_running_loop().call_later(pause_s, self._again, identity, command, self._call)

    def _again(self, identity: int, command: Command, call: Any) -> None:
        if self._call is call and self._pending.get(identity) is command:
            self._enqueue(identity, command)

    def _forget(self, identity: int) -> None:
        del self._pending[identity]
        self._refused.pop(identity, None)
        if identity in self._running:
            self._running.discard(identity)
            if self._steps:
                self._wake.set()

    def _fail_all(self, error: InferenceError) -> None:
        failed, self._pending = self._pending, {}
        self._refused.clear()
        for command in failed.values():
            command.fail(error)

    def _enqueue(self, identity: int, command: Command) -> None:
        (self._steps if isinstance(command, Step) else self._urgent).append(identity)
        self._wake.set()

    async def _write(self) -> None:
        call = self._call
        while True:
            while (message := self._next()) is not None:
                await call.write(message)
            self._wake.clear()
            await self._wake.wait()

    def _next(self) -> pb.Command | None:
        """The next message to write; None if there is none for now."""
        while self._urgent:
            identity = self._urgent.popleft()
            if identity == _PING:
                return pb.Command(id=_PING, renew=pb.RenewRequest())
            if (command := self._pending.get(identity)) is not None:
                return command.message(identity)
        while self._cancels:
            cancelled = self._cancels.popleft()
            if any(self._pending.get(identity) is cancelled for identity in self._running):
                return cancelled.cancel_message()
        while self._steps and len(self._running) < self._credits:
            identity = self._steps.popleft()
            if isinstance(step := self._pending.get(identity), Step):
                self._running.add(identity)
                if step.cancelled:
                    self._cancels.append(step)
                return step.message(identity)
        return None

    async def _watch(self) -> None:
        """Probe the bridge while a command is pending. Raises _Lost if it does not reply."""
        while True:
            await asyncio.sleep(SILENCE_S / 4)
            silent_s = time.monotonic() - self._heard
            if not self._pending:
                self._heard = time.monotonic()
            elif silent_s > SILENCE_S:
                raise _Lost(f"silent for {silent_s:.0f} s")
            elif silent_s > SILENCE_S / 2:
                with contextlib.suppress(ValueError):
                    self._urgent.remove(_PING)
                self._urgent.append(_PING)
                self._wake.set()
