"""JSON client of an engine's server: bounded retries after connection faults, errors with server and fix.

`config` has the defaults of timeout and retries.
"""

from __future__ import annotations

import asyncio
import functools
import json
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from contracts.errors import first_error
from contracts.replies import UnfitReply, bounded_async_client
from contracts.retries import backoff_s
from contracts.tracing import carrier
from inference.engines.config import CONNECTIONS, RETRIES, TIMEOUT_S
from inference.errors import EngineError, EngineStopped, EngineUnreachable, RequestTooLong, StaleVersion

T = TypeVar("T")
FIRST_PAUSE_S = 0.1
REPLY_BYTES = 1 << 30
"""Longest reply, or stream, that is read. Recorded routing of a long context has some 100 MB."""
_STATUSES = {"stale_policy_version": 409, "engine_stopped": 503, "internal": 500}
"""HTTP status of errors within a stream of Triplane's server, by code."""
_BUSY = (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_EARLY, httpx.codes.TOO_MANY_REQUESTS)
"""HTTP statuses of a server, or of a proxy before it, that takes no request for now."""
_FAULTS = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)


@functools.cache
def _tls() -> ssl.SSLContext:
    """One for all clients of this process: to read the certificates takes 20 ms."""
    return httpx.create_ssl_context()


class JsonClient:
    """Client for paths below one address.

    Any HTTP response is final, even an error. May be used from one event loop only, as httpx's pool requires.
    """

    def __init__(
        self,
        base: str,
        *,
        connections: int = CONNECTIONS,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.base, self._retries = base.rstrip("/"), retries
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        timeout = httpx.Timeout(timeout_s, connect=min(10.0, timeout_s), pool=None)
        options = {"headers": headers, "limits": limits, "timeout": timeout, "verify": _tls()}
        self._http = bounded_async_client(REPLY_BYTES, **options)

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None, **query: Any) -> Any:
        """Reply of the server.

        Raises EngineUnreachable without a response, EngineStopped for a failure of the server (5xx) or one that is busy
        (408, 425, 429), StaleVersion, RequestTooLong, and EngineError for other errors.
        """
        url = f"{self.base}{path}"

        def send() -> Awaitable[httpx.Response]:
            return self._http.request(method, url, json=body, params=query, headers=carrier())

        return _read(url, await self._sent(url, send))

    async def read(self, method: str, path: str, take: Callable[[Any], T], body: dict[str, Any] | None = None) -> T:
        """What `take` finds in the reply. Raises what `call` raises, and EngineError for a reply without that."""
        reply = await self.call(method, path, body)
        with reading(f"{self.base}{path}"):
            return take(reply)

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """JSON objects that the server sends in reply to a POST, as server-sent events up to `[DONE]`.

        Raises what `call` raises; only faults before the reply begins are retried.
        """
        url = f"{self.base}{path}"

        def send() -> Awaitable[httpx.Response]:
            return self._http.send(self._http.build_request("POST", url, json=body, headers=carrier()), stream=True)

        response = await self._sent(url, send)
        try:
            if not response.is_success or "text/event-stream" not in response.headers.get("content-type", ""):
                await response.aread()
                _read(url, response)
                raise EngineError(f"{url} sent no stream of events: check that its server streams completions")
            async for line in _lines(response):
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").decode(errors="replace").strip()
                if data == "[DONE]":
                    return
                yield _event(url, data)
            raise EngineUnreachable(f"{url} broke off its stream: repeat the call")
        except httpx.TimeoutException as error:
            raise EngineUnreachable(f"{url} timed out ({type(error).__name__}): raise timeout_s") from error
        except UnfitReply as error:
            raise _unfit(url, error) from None
        except httpx.TransportError as error:
            raise EngineUnreachable(f"{url} broke off its stream ({type(error).__name__}): repeat the call") from error
        finally:
            await response.aclose()

    async def _sent(self, url: str, send: Callable[[], Awaitable[httpx.Response]]) -> httpx.Response:
        """The first response to a request."""
        for attempt in range(self._retries + 1):
            if self._http.is_closed:  # closed after a replacement of the server, while this call waited for its retry
                raise EngineUnreachable(f"the client of {url} was closed: repeat the call")
            try:
                return await send()
            except _FAULTS as error:
                if attempt == self._retries:
                    raise EngineUnreachable(
                        f"{url} can't be reached ({type(error).__name__}, {attempt + 1} attempts):"
                        " start the server or correct the address"
                    ) from error
                await asyncio.sleep(backoff_s(attempt + 1, FIRST_PAUSE_S))
            except (httpx.UnsupportedProtocol, httpx.InvalidURL, UnicodeError, ExceptionGroup) as error:
                why = first_error(error)  # a group: of a port above 65535
                raise EngineError(f"{url} is not the address of an engine ({why}): write http://host:port/v1") from None
            except httpx.TimeoutException as error:
                raise EngineUnreachable(f"{url} timed out ({type(error).__name__}): raise timeout_s") from error
            except UnfitReply as error:
                raise _unfit(url, error) from None
            except httpx.TransportError as error:  # such as the refusal of a proxy
                raise EngineUnreachable(f"{url} can't be reached ({type(error).__name__}: {error}): check it") from None
        raise AssertionError("the loop returns or raises")

    async def is_healthy(self, path: str, timeout_s: float) -> bool:
        """Whether the server replies to a GET of `path` with success in time."""
        try:
            return (await self._http.get(f"{self.base}{path}", timeout=timeout_s)).is_success
        except httpx.HTTPError:
            return False

    async def close(self) -> None:
        """Close the connections; the server keeps running."""
        await self._http.aclose()


@contextmanager
def reading(server: str) -> Iterator[None]:
    """Raise EngineError where the block finds another reply than the server's API has."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        said = f"{type(error).__name__}: {error}"[:200]
        raise EngineError(f"{server} sent an invalid reply ({said}): check that an engine's API runs there") from error


def _read(url: str, response: httpx.Response) -> Any:
    if response.is_success:
        try:
            return response.json() if response.content else None
        except (ValueError, RecursionError):
            said = " ".join(response.text[:60].split())
            raise EngineError(f"{url} sent an invalid reply, {said!r}: check that an engine's API runs there") from None
    message, code = _detail(response)
    raise _error(f"{url} answered {response.status_code}", response.status_code, message, code)


async def _lines(response: httpx.Response) -> AsyncGenerator[bytes]:
    """Lines of a stream of events. httpx would also break them at characters within JSON, such as U+2028."""
    begun = bytearray()
    async for chunk in response.aiter_bytes():
        rest, *more = chunk.split(b"\n")
        begun += rest
        for each in more:
            yield bytes(begun)
            begun = bytearray(each)
    yield bytes(begun)


def _event(url: str, data: str) -> dict[str, Any]:
    """An event of a stream. Raises EngineError for one that tells of an error, as vLLM's and ours do."""
    try:
        found = json.loads(data)
        error = found.get("error")
        code = None if error is None else error.get("code")
    except (ValueError, AttributeError, RecursionError):
        raise EngineError(
            f"{url} sent an invalid event, {data[:60]!r}: check that an engine's API runs there"
        ) from None
    if error is not None:
        status = code if isinstance(code, int) else _STATUSES.get(str(code), httpx.codes.BAD_REQUEST)
        raise _error(f"{url} ended its stream", status, str(error.get("message")), code)
    event: dict[str, Any] = found
    return event


def _unfit(url: str, error: UnfitReply) -> EngineError:
    return EngineError(f"{url} sent an invalid reply ({error}): check that an engine's API runs there")


def _error(began: str, status: int, message: str, code: Any) -> EngineError:
    if status == httpx.codes.CONFLICT:
        return StaleVersion(message)
    if code == "context_length_exceeded" or "maximum context length" in message:
        return RequestTooLong(message)
    kind = EngineStopped if status >= 500 or status in _BUSY else EngineError
    return kind(f"{began}: {message}")


def _detail(response: httpx.Response) -> tuple[str, Any]:
    """(message, code) of an error in OpenAI's form, or of any other reply."""
    try:
        detail = response.json()["error"]
        return str(detail["message"]), detail.get("code")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return response.text[:200], None
