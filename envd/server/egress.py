"""Egress of sandboxes: one HTTP proxy for each sandbox whose rules allow destinations.

    in the sandbox: curl --http_proxy--> 127.0.0.1:3128 = a listening socket of its own network namespace
    here:           accept -> head -> Destinations: the name -> resolve once -> each address -> connect to that very
                    address
                      CONNECT: bytes both ways (envd/server/egress_relay.py);  http://...: one request
                      (envd/server/egress_http.py)

A refused request is answered with 403 and one line, and recorded as `network.denied`. Connections, their rate, request
heads, times and buffers are all bounded.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import h11

from envd.backends.base import NetworkRule
from envd.server.audit import AuditLog
from envd.server.destinations import Address, DestinationRefused, Destinations, plain
from envd.server.egress_http import BadRequest, Exchange, Target, read_request, say
from envd.server.egress_record import RequestRecord
from envd.server.egress_relay import Stream, connect, relay

MOST = 32
"""Maximum number of connections of one sandbox."""
_MOST_OF_ALL = 8192
_PACE_S = 0.005
"""Pause, in seconds, between two accepted connections of one sandbox."""
_FULL_S = 0.1
"""The same pause while a connection limit is reached."""
_RESOLVE_S, _CONNECT_S = 10.0, 10.0
_ADDRESSES = 4
"""Maximum number of addresses that are tried for a name."""
_RESOLVING = 2
"""Maximum number of concurrent name lookups of one sandbox; each takes a thread."""
_RESOLVERS = 32
_log = logging.getLogger("envd")

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Function that returns the addresses of a name and port. Raises OSError."""


class Egress:
    """State that all proxies of a server share: counters, limits and resolver threads."""

    def __init__(self, audit: AuditLog, resolve: Resolve | None = None) -> None:
        self.audit, self.resolve = audit, resolve or self._resolve
        self.connections = 0
        """Current number of connections of all sandboxes."""
        self.sent = self.received = 0
        """Bytes from and to sandboxes, over connections that have ended."""
        self.most = min(_MOST_OF_ALL, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 8)
        self._threads: ThreadPoolExecutor | None = None

    def open(
        self,
        listener: socket.socket,
        rules: Sequence[NetworkRule],
        sandbox_id: str,
        record: RequestRecord | None = None,
    ) -> Proxy:
        """Start the proxy of a sandbox. record: keeps its requests; tunnels are refused then.

        The socket must be non-blocking. The caller keeps it and closes it after `Proxy.stop`.
        """
        return Proxy(self, listener, Destinations(rules), sandbox_id, record)

    def stop(self) -> None:
        """Stop the resolver threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _resolve(self, host: str, port: int) -> Sequence[str]:
        """Resolve a name in a separate thread pool, so that a slow lookup delays no other work."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_RESOLVERS, "envd-names")
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return [str(where[0]) for *_, where in found]


class Proxy:
    """The proxy of one sandbox."""

    def __init__(
        self,
        egress: Egress,
        listener: socket.socket,
        allowed: Destinations,
        sandbox_id: str,
        record: RequestRecord | None = None,
    ) -> None:
        self._record = record
        self._egress, self._listener, self._allowed, self._sandbox_id = egress, listener, allowed, sandbox_id
        self._resolving = asyncio.Semaphore(_RESOLVING)
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self) -> None:
        """Close all connections. Idempotent."""
        tasks = [self._accepting, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                _log.error("the proxy of sandbox %s accepts nothing: %s", self._sandbox_id, error)
                await asyncio.sleep(1.0)
                continue
            full = len(self._tasks) >= MOST or self._egress.connections >= self._egress.most
            if full:
                self._turn_away(connection)
            else:
                self._egress.connections += 1
                task = asyncio.create_task(self._serve(connection))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
            await asyncio.sleep(_FULL_S if full else _PACE_S)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._egress.connections -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a connection of a sandbox's proxy failed", exc_info=error)

    def _turn_away(self, connection: socket.socket) -> None:
        self._deny("", "too many connections")
        with connection:
            try:
                connection.setblocking(False)
                connection.send(say(503, f"this sandbox has its {MOST} connections: close one and try again"))
            except OSError:
                pass  # the client has disconnected

    def _deny(self, destination: str, reason: str) -> None:
        self._egress.audit.record("network.denied", self._sandbox_id, destination=destination, reason=reason)

    async def _serve(self, connection: socket.socket) -> None:
        """Serve one connection until it ends."""
        try:
            inside = await Stream.over(connection)
            try:
                await self._answer(inside)
            finally:
                inside.abort()
        except OSError:
            pass  # one of the two ends has disconnected

    async def _answer(self, inside: Stream) -> None:
        machine = h11.Connection(h11.SERVER, max_incomplete_event_size=16 * 1024)
        where = ""
        try:
            request, target = await read_request(inside, machine)
            where = f"{target.host}:{target.port}"
            if target.tunnel and self._record is not None:
                raise DestinationRefused("this sandbox's requests are recorded, so it has no tunnels: use http://")
            outside = await self._connected(target)
        except BadRequest as error:
            if error.told:
                self._deny(where, error.reason)
            await inside.finish(say(error.status, error.reason))
            return
        except DestinationRefused as error:
            self._deny(where, str(error))
            await inside.finish(say(403, str(error)))
            return
        if self._egress.audit.calls:
            self._egress.audit.record("network.connected", self._sandbox_id, destination=where)
        try:
            await self._carry(inside, outside, machine, request, target)
        finally:
            outside.abort()
            self._egress.sent += outside.written
            self._egress.received += inside.written

    async def _carry(
        self, inside: Stream, outside: Stream, machine: h11.Connection, request: h11.Request, target: Target
    ) -> None:
        if target.tunnel:
            await inside.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await relay(inside, outside, machine.trailing_data[0])
            return
        recorded = None if self._record is None else self._record.begin(request.method, target)
        exchange = Exchange(inside, outside, machine, recorded)
        try:
            await exchange.run(request, target)
        except BadRequest as error:
            if error.told:
                self._deny(f"{target.host}:{target.port}", error.reason)
            if not exchange.answered:
                await inside.finish(say(error.status, error.reason))

    async def _connected(self, target: Target) -> Stream:
        """Connect to a checked address of a target. Raises DestinationRefused, BadRequest if none can be reached."""
        addresses = await self._addresses(target)
        words = ""
        for address in addresses[:_ADDRESSES]:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    return await connect(address, target.port)
            except OSError as error:  # includes TimeoutError
                words = error.strerror or "it did not answer in time"
        raise BadRequest(f"{target.host}:{target.port} can't be reached: {words}", 502, told=False)

    async def _addresses(self, target: Target) -> list[Address]:
        """Allowed addresses of a target. The name is resolved only once, so that a later answer can't differ."""
        literal = self._allowed.check_host(target.host, target.port)
        if literal is not None:
            return [plain(literal)]
        try:
            async with asyncio.timeout(_RESOLVE_S):
                found = await self._resolved(target)
        except (OSError, UnicodeError) as error:
            words = getattr(error, "strerror", None) or "no answer in time"
            raise BadRequest(f"{target.host} has no address: {words}", 502, told=False) from error
        addresses, refusal = list[Address](), None
        for address in dict.fromkeys(plain(ipaddress.ip_address(each.partition("%")[0])) for each in found):
            try:
                self._allowed.check_address(target.host, address, target.port, named=True)
                addresses.append(address)
            except DestinationRefused as error:
                refusal = error
        if not addresses:
            raise refusal or BadRequest(f"{target.host} has no address", 502, told=False)
        return addresses

    async def _resolved(self, target: Target) -> Sequence[str]:
        """Addresses of a target's name.

        A lookup counts against _RESOLVING until it ends, also after its caller is cancelled, since it holds a thread.
        """
        await self._resolving.acquire()
        lookup = asyncio.ensure_future(self._egress.resolve(target.host, target.port))
        lookup.add_done_callback(self._looked_up)
        return await asyncio.shield(lookup)

    def _looked_up(self, lookup: asyncio.Future[Sequence[str]]) -> None:
        self._resolving.release()
        if not lookup.cancelled():
            lookup.exception()  # marks it as retrieved, also if the connection has ended
