"""HTTP of the sandboxes' proxies: one HTTP/1.1 request per connection, parsed and rewritten by h11, so that none of the
sandbox's framing is passed on.

A second request on a connection is never read. Nothing from the sandbox is forwarded after the first request's end,
however its end is parsed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import h11

from envd.errors import EnvdError
from envd.server.egress_relay import IDLE_S, Stream, moved

HEAD_S = 10.0
"""Maximum time, in seconds, to receive a request's head."""
_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    )
)
"""Hop-by-hop headers (RFC 9110, 7.6.1); those that begin with Proxy- are removed too."""
_MOST_RESPONSE_HEAD = 64 * 1024
Headers = list[tuple[bytes, bytes]]


class BadRequest(EnvdError):
    """A request that is answered with an error, caused by the sandbox or by the destination."""

    def __init__(self, reason: str, status: int = 400, *, told: bool = True) -> None:
        """told: whether it is recorded as an audit event."""
        super().__init__(reason)
        self.reason, self.status, self.told = reason, status, told


@dataclass(frozen=True)
class Target:
    """Destination of a request."""

    host: str
    """Name in lower case without its trailing dot, or an address."""
    port: int
    tunnel: bool
    path: bytes = b""
    authority: bytes = b""

    @classmethod
    def of(cls, method: bytes, target: bytes) -> Target:
        """Parse the target of a request line. Raises BadRequest."""
        tunnel = method == b"CONNECT"
        try:
            text = target.decode("ascii")
            parts = urlsplit(f"//{text}" if tunnel else text)
            host, port = (parts.hostname or "").removesuffix("."), parts.port
        except ValueError as error:
            raise BadRequest(
                "the request names no destination: write CONNECT host:port, or http://host/path"
            ) from error
        plain = parts.path == "" and parts.query == "" if tunnel else parts.scheme == "http"
        if not plain or not host or "@" in parts.netloc or "#" in text or "?" in parts.netloc or port == 0:
            raise BadRequest("this is a proxy: ask it for CONNECT host:port, or for http://host/path")
        if tunnel and port is None:
            raise BadRequest("CONNECT names no port: write host:port")
        path = (parts.path or ("*" if method == b"OPTIONS" else "/")) + (f"?{parts.query}" if parts.query else "")
        shown = f"[{host}]" if ":" in host else host
        authority = shown if port in (None, 80) else f"{shown}:{port}"
        return cls(host, port or 80, tunnel, path.encode(), authority.encode())


class Recorder(Protocol):
    """What is told of one request while it is forwarded (envd/server/egress_record.py)."""

    status: int

    def feed(self, data: bytes) -> None:
        """A piece of the body."""

    def end(self) -> None:
        """All of the request was forwarded."""


def say(status: int, reason: str) -> bytes:
    """Complete HTTP response with a body of one line."""
    words = "".join(each if each.isprintable() else "?" for each in reason)
    body = f"envd: {words}\n".encode()
    head = f"HTTP/1.1 {status} {_NAMES.get(status, 'Error')}\r\nContent-Type: text/plain; charset=utf-8\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


_NAMES = {400: "Bad Request", 403: "Forbidden", 408: "Request Timeout", 502: "Bad Gateway", 503: "Service Unavailable"}


async def read_request(inside: Stream, machine: h11.Connection) -> tuple[h11.Request, Target]:
    """Read the head of the request. Raises BadRequest, and OSError if the sandbox has disconnected."""
    try:
        async with asyncio.timeout(HEAD_S):
            event = await _next(inside, machine)
    except TimeoutError as error:
        raise BadRequest(f"the request's header did not arrive within {HEAD_S:g} s", 408) from error
    except h11.RemoteProtocolError as error:
        raise BadRequest(f"not an HTTP/1.1 request: {error}") from error
    if not isinstance(event, h11.Request):
        raise ConnectionResetError("the client sent nothing")
    names = [key for key, _ in event.headers]
    framed = names.count(b"transfer-encoding") + names.count(b"content-length")
    target = Target.of(event.method, event.target)
    if framed > 1 or (target.tunnel and framed) or (b"transfer-encoding" in names and event.http_version != b"1.1"):
        raise BadRequest("the request gives its length in more than one way: send either Content-Length or chunks")
    return event, target


class Exchange:
    """One plain request and its response."""

    def __init__(
        self, inside: Stream, outside: Stream, machine: h11.Connection, recorded: Recorder | None = None
    ) -> None:
        """recorded: told of the request's body and its answer."""
        self._recorded = recorded
        self._inside, self._outside, self._server = inside, outside, machine
        self._client = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MOST_RESPONSE_HEAD)
        self.answered = False
        """Whether anything was sent to the sandbox."""

    async def run(self, request: h11.Request, target: Target) -> None:
        """Forward the request and its response. Raises BadRequest, OSError, also after IDLE_S without traffic."""
        headers = [(b"Host", target.authority), *_end_to_end(request.headers), (b"Connection", b"close")]
        if any(key == b"transfer-encoding" for key, _ in request.headers):
            headers.append((b"Transfer-Encoding", b"chunked"))
        try:
            head = self._client.send(h11.Request(method=request.method, target=target.path, headers=headers))
            async with asyncio.timeout(IDLE_S) as bound:
                await self._outside.write(head or b"")
                whole = await self._both_ways(bound)
        except h11.LocalProtocolError as error:
            raise BadRequest(f"the request can't be forwarded: {error}") from error
        except h11.RemoteProtocolError as error:
            raise BadRequest(f"{target.host} does not answer in HTTP/1.1: {error}", 502, told=False) from error
        surplus = self._server.trailing_data[0] if whole else b""
        if (await self._inside.finish(b"") and whole) or surplus:
            raise BadRequest("a second request on one connection was not read: open another")

    async def _both_ways(self, bound: asyncio.Timeout) -> bool:
        """Send and receive until the response is complete; return whether the whole request was sent by then."""
        sending = asyncio.ensure_future(self._send_body(bound))
        try:
            await self._receive(bound)
        except (h11.RemoteProtocolError, OSError):
            if sending.done() and isinstance(error := sending.exception(), BadRequest):
                raise error from None  # it caused the current exception
            raise
        finally:
            sending.cancel()
            await asyncio.wait([sending])
        return not sending.cancelled() and sending.exception() is None

    async def _send_body(self, bound: asyncio.Timeout) -> None:
        """Send the request's body. A failure aborts the exchange, since a partial request gets no response."""
        try:
            while True:
                event = await _next(self._inside, self._server)
                moved(bound)
                if isinstance(event, h11.Data):
                    if self._recorded is not None:
                        self._recorded.feed(bytes(event.data))
                    await self._outside.write(self._client.send(h11.Data(data=event.data)) or b"")
                elif isinstance(event, h11.EndOfMessage):
                    await self._outside.write(self._client.send(h11.EndOfMessage()) or b"")
                    if self._recorded is not None:
                        self._recorded.end()
                    return
                else:
                    raise ConnectionResetError("the client disconnected in the middle of its request")
        except h11.RemoteProtocolError as error:
            self._outside.abort()
            raise BadRequest(f"the request's body is malformed: {error}") from error
        except OSError:
            self._outside.abort()
            raise

    async def _receive(self, bound: asyncio.Timeout) -> None:
        while True:
            event = await _next(self._outside, self._client)
            moved(bound)
            if isinstance(event, h11.InformationalResponse):
                if self._server.their_http_version == b"1.1":
                    headers = _end_to_end(event.headers)
                    await self._tell(h11.InformationalResponse(status_code=event.status_code, headers=headers))
            elif isinstance(event, h11.Response):
                headers = [*_end_to_end(event.headers), (b"Connection", b"close")]
                status = event.status_code
                if self._recorded is not None:
                    self._recorded.status = status
                await self._tell(h11.Response(status_code=status, reason=event.reason, headers=headers))
            elif isinstance(event, h11.Data):
                await self._tell(h11.Data(data=event.data))
            elif isinstance(event, h11.EndOfMessage):
                await self._tell(h11.EndOfMessage())
                return
            else:
                raise h11.RemoteProtocolError("it ended before its response")

    async def _tell(self, event: h11.Event) -> None:
        data = self._server.send(event)
        self.answered = True
        if data:
            await self._inside.write(data)


def _end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers without the hop-by-hop ones and without Host, which is rewritten. Content-Length is kept unless the body
    is chunked.
    """
    named = {name.strip().lower() for key, value in headers if key == b"connection" for name in value.split(b",")}
    left_out = (named - {b"content-length"}) | _HOP | {b"host"}
    if any(key == b"transfer-encoding" for key, _ in headers):
        left_out |= {b"content-length"}
    return [(key, value) for key, value in headers if key not in left_out and not key.startswith(b"proxy-")]


async def _next(stream: Stream, machine: h11.Connection) -> object:
    """Next h11 event from a stream. Raises h11.RemoteProtocolError, OSError."""
    while (event := machine.next_event()) is h11.NEED_DATA:
        machine.receive_data(await stream.read())
    return event
