"""HTTP client of a language or reward model: bounded concurrency, deadlines, retries with jitter for infrastructure
faults.

A reply is JSON, which the caller interprets, a refusal of this one request, or a fault.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import httpx

from contracts.errors import InfraFault, first_error
from contracts.replies import UnfitReply, bounded_async_client
from contracts.retries import backoff_s
from curation.endpoint import Endpoint
from curation.errors import CurationError, RequestRefused
from curation.rewards.answers import Answer

BACKOFF_S = 0.5
"""Mean pause after the first fault, in seconds; `backoff_s` gives later pauses."""
MAX_PAUSE_S = 60.0
"""Longest pause, in seconds, even if Retry-After asks for more."""
MAX_REPLY = 16 << 20
"""Maximum bytes of a reply. The vectors of 128k tokens with two numbers each have some 5 MB."""
MAX_TEXT = 200
"""Maximum characters of a server's reply in an error."""

_AGAIN = {408, 425, 429}
_MISTAKES = {401, 403, 404, 405}
_MISCONFIGURED = {
    401: "it requires an API key: name its environment variable in endpoint.api_key_env",
    403: "the API key lacks permission: check endpoint.api_key_env and the model's name",
    404: "check endpoint.url and the model's name",
    405: "check endpoint.url",
}


class EndpointClient:
    """Client of one endpoint. May be used from one event loop only."""

    def __init__(self, who: str, endpoint: Endpoint) -> None:
        """who: what asks, for errors, such as "component review".

        Raises CurationError if the environment variable of the key is not set.
        """
        self._who, self._endpoint = who, endpoint
        self._url = endpoint.url.rstrip("/")
        self._key = _key(self._who, endpoint)
        self.slots = asyncio.Semaphore(endpoint.concurrency)
        """A slot is held from before a request until its reply is stored: a kill loses at most one reply per slot."""
        self._http = bounded_async_client(
            MAX_REPLY,
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            limits=httpx.Limits(max_connections=endpoint.concurrency),
            timeout=httpx.Timeout(endpoint.timeout_s, connect=min(10.0, endpoint.timeout_s), pool=None),
        )
        self.requests = 0
        """Number of requests sent."""

    async def post(self, path: str, body: dict[str, Any], read: Callable[[Any], Answer]) -> Answer:
        """Reply to a request. path: appended to the endpoint's URL.

        The caller holds a slot. read: extracts the reply from the JSON, or raises ValueError.

        Raises InfraFault after the last attempt, RequestRefused if the server refuses this request, CurationError if it
        refuses all requests.
        """
        url = self._url + path
        fault, asked = "", 0.0
        for attempt in range(self._endpoint.attempts):
            if attempt:
                await asyncio.sleep(min(MAX_PAUSE_S, max(asked, backoff_s(attempt, BACKOFF_S))))
            try:
                self.requests += 1
                async with asyncio.timeout(self._endpoint.timeout_s):
                    response = await self._http.post(url, json=body)
                if not self._faulty(response):
                    return self._answer(url, response, read)
                fault, asked = f"HTTP {response.status_code}", _retry_after(response)
            except (httpx.InvalidURL, ExceptionGroup) as error:
                why = first_error(error)  # a group: of a port above 65535
                raise CurationError(f"{self._who}: {url} is not a URL ({why}): correct endpoint.url") from None
            except (httpx.TimeoutException, TimeoutError):
                fault, asked = f"no answer within {self._endpoint.timeout_s:g} s", 0.0
            except (UnfitReply, ValueError, RecursionError) as error:
                fault, asked = f"its answer can't be read: {error}", 0.0
            except httpx.HTTPError as error:
                fault, asked = type(error).__name__, 0.0
        raise InfraFault(
            f"{self._who}: {url} failed {self._endpoint.attempts} times ({fault}): start that server or correct"
            " endpoint.url, then run the same step again"
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    def _faulty(self, response: httpx.Response) -> bool:
        return response.status_code in _AGAIN or response.status_code >= 500

    def _answer(self, url: str, response: httpx.Response, read: Callable[[Any], Answer]) -> Answer:
        if response.is_success:
            return read(response.json())
        status, said = response.status_code, self._said(response)
        if status in _MISTAKES or response.is_redirect:
            fix = _MISCONFIGURED.get(status, "name the address it redirects to in endpoint.url")
            raise CurationError(f"{self._who}: {url} answered {status} ({said}): {fix}")
        raise RequestRefused(f"{self._who}: {url} answered {status} ({said})")

    def _said(self, response: httpx.Response) -> str:
        """Text of a server's error on one line, without our key, which servers may echo."""
        text = " ".join(response.text.split())
        return (text.replace(self._key, "***") if self._key else text)[:MAX_TEXT]


def _key(who: str, endpoint: Endpoint) -> str | None:
    if endpoint.api_key_env is None:
        return None
    key = os.environ.get(endpoint.api_key_env, "").strip()
    if not key:
        raise CurationError(
            f"{who}: ${endpoint.api_key_env} is not set: export the key of {endpoint.url}, or set api_key_env to null"
        )
    return key


def _retry_after(response: httpx.Response) -> float:
    """Seconds that a server asks to wait; 0 if it gives none, or a date."""
    try:
        return max(0.0, float(response.headers.get("Retry-After", "0")))
    except ValueError:
        return 0.0
