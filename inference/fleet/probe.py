"""Ask a replica whether it is well, and which policy version it serves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx

CHECK_S = 10.0
"""Timeout of a probe, in seconds."""
_TIMEOUT = httpx.Timeout(CHECK_S, connect=CHECK_S / 2)
VERSION = "x-policy-version"
"""Header of a request that must get tokens of this policy version alone, and of a reply that has them."""


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
            (await client.get(f"{url}/health", timeout=_TIMEOUT)).raise_for_status()
            return Found(None, version=await served_version(client, url))
    except TimeoutError:
        return Found(f"no reply to a probe within {CHECK_S:g} s")
    except httpx.HTTPStatusError as error:
        return Found(f"GET {error.request.url.path} answered {error.response.status_code}")
    except httpx.HTTPError as error:
        away = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        return Found(f"no reply to GET /health ({type(error).__name__})", away)


async def served_version(client: httpx.AsyncClient, url: str) -> str | None:
    """Policy version of the next token: of vLLM and SGLang their mark, of ours that of its model. None: unknown.

    Raises httpx.HTTPError, also for a server that has no model yet.
    """
    marked = _json(await client.get(f"{url}/weight_info", timeout=_TIMEOUT))
    if "weight_version" in marked:
        return str(marked["weight_version"])
    reply = await client.get(f"{url}/v1/models", timeout=_TIMEOUT)
    if reply.is_server_error:
        reply.raise_for_status()
    models = _json(reply).get("data")
    first = models[0] if isinstance(models, list) and models and isinstance(models[0], dict) else {}
    return str(first["version"]) if "version" in first else None


def _json(reply: httpx.Response) -> dict[str, Any]:
    try:
        found = reply.json() if reply.is_success else None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
