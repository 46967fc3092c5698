"""What stands before the MCP server on HTTP: the key, and sessions.

A sandbox keeps state between calls, so over HTTP a client needs a session. Protocol versions without sessions
(2026-07-28 and later) are answered with the versions that have them, to which clients fall back by themselves.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import mcp_types as types
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from envd.mcp.server import SESSION_HEADER

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
_VERSION_HEADER = "mcp-protocol-version"


class Gate:
    """ASGI: checks keys and versions, and tells when a client ended its session."""

    def __init__(self, app: App, keys: Sequence[bytes], ended: Callable[[str], Awaitable[None]]) -> None:
        """keys: bearer keys that are accepted; none: no key is asked for."""
        self._app, self._keys, self._ended = app, keys, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if not self._admits(headers.get("authorization", "")):
            await _refuse(send, 401, types.INVALID_REQUEST, "a bearer key is missing or wrong", None)
            return
        version = headers.get(_VERSION_HEADER)
        if version is not None and version not in HANDSHAKE_PROTOCOL_VERSIONS:
            data = {"supported": list(HANDSHAKE_PROTOCOL_VERSIONS), "requested": version}
            words = f"protocol version {version[:40]!r} has no sessions, which sandboxes need"
            await _refuse(send, 400, types.UNSUPPORTED_PROTOCOL_VERSION, words, data)
            return
        if scope["method"] != "DELETE" or SESSION_HEADER not in headers:
            await self._app(scope, receive, send)
            return
        statuses: list[int] = []

        async def noted(message: MutableMapping[str, Any]) -> None:
            statuses.append(message.get("status", 0))
            await send(message)

        await self._app(scope, receive, noted)
        if statuses and statuses[0] < 300:
            await self._ended(headers[SESSION_HEADER])

    def _admits(self, authorization: str) -> bool:
        given = authorization.removeprefix("Bearer ").encode()
        return not self._keys or any(secrets.compare_digest(given, key) for key in self._keys)


async def _refuse(send: Send, status: int, code: int, words: str, data: Any) -> None:
    error = {"code": code, "message": words} | ({} if data is None else {"data": data})
    body = json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
