"""JSON client of an engine's server: bounded retries after connection faults, errors with server and fix.

`config` has the defaults of timeout and retries.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from typing import Any

import httpx

from contracts.retries import backoff_s
from inference.engines.config import CONNECTIONS, RETRIES, TIMEOUT_S
from inference.errors import EngineError, EngineStopped, EngineUnreachable, RequestTooLong, StaleVersion

FIRST_PAUSE_S = 0.1
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
        self._http = httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout, verify=_tls())

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None, **query: Any) -> Any:
        """Reply of the server.

        Raises EngineUnreachable without a response, EngineStopped for a failure of the server (5xx), StaleVersion,
        RequestTooLong, and EngineError for other errors.
        """
        url = f"{self.base}{path}"
        for attempt in range(self._retries + 1):
            if self._http.is_closed:  # closed after a replacement of the server, while this call waited for its retry
                raise EngineUnreachable(f"the client of {url} was closed: repeat the call")
            try:
                return _read(url, await self._http.request(method, url, json=body, params=query))
            except _FAULTS as error:
                if attempt == self._retries:
                    raise EngineUnreachable(
                        f"{url} can't be reached ({type(error).__name__}, {attempt + 1} attempts):"
                        " start the server or correct the address"
                    ) from error
                await asyncio.sleep(backoff_s(attempt + 1, FIRST_PAUSE_S))
            except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
                raise EngineError(
                    f"{url} is not the address of an engine ({error}): write http://host:port/v1"
                ) from None
            except httpx.TimeoutException as error:
                raise EngineUnreachable(f"{url} timed out ({type(error).__name__}): raise timeout_s") from error
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


def _read(url: str, response: httpx.Response) -> Any:
    if response.is_success:
        try:
            return response.json() if response.content else None
        except ValueError:
            said = " ".join(response.text[:60].split())
            raise EngineError(f"{url} sent an invalid reply, {said!r}: check that an engine's API runs there") from None
    message, code = _detail(response)
    if response.status_code == httpx.codes.CONFLICT:
        raise StaleVersion(message)
    if code == "context_length_exceeded" or "maximum context length" in message:
        raise RequestTooLong(message)
    kind = EngineStopped if response.status_code >= 500 else EngineError
    raise kind(f"{url} answered {response.status_code}: {message}")


def _detail(response: httpx.Response) -> tuple[str, Any]:
    """(message, code) of an error in OpenAI's form, or of any other reply."""
    try:
        detail = response.json()["error"]
        return str(detail["message"]), detail.get("code")
    except (ValueError, KeyError, TypeError):
        return response.text[:200], None
