"""Ask a replica whether it is well, and which policy version it serves."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

import httpx

CHECK_S = 10.0
"""Timeout of a probe, in seconds."""
_TIMEOUT = httpx.Timeout(CHECK_S, connect=CHECK_S / 2)
VERSION = "x-policy-version"
"""Header of a request that must get tokens of this policy version alone, and of a reply that has them."""

REPLY_BYTES = 1024 * 1024
"""Longest reply of a replica to a question about itself."""
VERSION_CHARACTERS = 256
"""Longest policy version of a replica."""


class InvalidReply(httpx.HTTPError):
    """A replica's reply about itself is too long, or names a version that is none."""


@dataclass(frozen=True)
class Found:
    """Outcome of a probe."""

    fault: str | None
    away: bool = False
    """Whether nobody accepted the connection."""
    version: str | None = None
    """Policy version; None: it does not say."""


async def probe(client: httpx.AsyncClient, url: str) -> Found:
    """Health and version of a replica."""
    try:
        async with asyncio.timeout(CHECK_S):
            (await get(client, f"{url}/health"))[0].raise_for_status()
            return Found(None, version=await served_version(client, url))
    except TimeoutError:
        return Found(f"no reply to a probe within {CHECK_S:g} s")
    except httpx.HTTPStatusError as error:
        return Found(f"GET {error.request.url.path} answered {error.response.status_code}")
    except InvalidReply as error:
        return Found(str(error))
    except httpx.HTTPError as error:
        away = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        return Found(f"no reply to GET /health ({type(error).__name__})", away)


async def served_version(client: httpx.AsyncClient, url: str) -> str | None:
    """Policy version of the next token: of vLLM and SGLang their mark, of ours that of its model. None: unknown.

    Raises httpx.HTTPError, also for a server that has no model yet.
    """
    marked = _json(*await get(client, f"{url}/weight_info"))
    if "weight_version" in marked:
        return _version(marked["weight_version"])
    reply, content = await get(client, f"{url}/v1/models")
    if reply.is_server_error:
        reply.raise_for_status()
    models = _json(reply, content).get("data")
    first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
    return _version(first["version"]) if "version" in first else None


async def get(client: httpx.AsyncClient, url: str) -> tuple[httpx.Response, bytes]:
    """A replica's reply to GET, and its body as sent.

    Raises httpx.HTTPError, which is InvalidReply for a body over REPLY_BYTES.
    """
    headers, content = {"accept-encoding": "identity"}, b""
    async with client.stream("GET", url, headers=headers, timeout=_TIMEOUT) as reply:
        async for chunk in reply.aiter_raw():
            content += chunk
            if len(content) > REPLY_BYTES:
                raise InvalidReply(f"GET {reply.request.url.path} answered more than {REPLY_BYTES >> 20} MiB")
    return reply, content


def _json(reply: httpx.Response, content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content) if reply.is_success else None
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _version(found: object) -> str:
    """A policy version in a reply. Raises InvalidReply."""
    version = str(found) if isinstance(found, str | int) else ""
    try:
        version.encode()
    except UnicodeEncodeError:
        version = ""
    if not 0 < len(version) <= VERSION_CHARACTERS:
        raise InvalidReply(f"it names no policy version of 1 to {VERSION_CHARACTERS} characters of Unicode")
    return version
