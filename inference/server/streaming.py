"""Streams of the HTTP API: server-sent events with parts of an answer, as OpenAI's."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from inference.server.replies import error_of


async def begin_events(parts: AsyncGenerator[dict[str, Any]]) -> StreamingResponse:
    """Reply that sends each part as an event, once there is a first one, and `[DONE]` after the last.

    Raises what `parts` raises before its first one; a later error is sent as the last event.
    """
    try:
        first = await anext(parts)
    except BaseException:
        await parts.aclose()
        raise

    async def events() -> AsyncGenerator[str]:
        yield _event(first)
        try:
            async for part in parts:
                yield _event(part)
        except Exception as error:  # noqa: BLE001 (told to the client)
            yield _event(error_of(error)[1])
            return
        yield "data: [DONE]\n\n"

    return _Events(events(), parts)


class _Events(StreamingResponse):
    """Closes its parts in the end, also if its client leaves."""

    def __init__(self, events: AsyncGenerator[str], parts: AsyncGenerator[dict[str, Any]]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._sent, self._parts = events, parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._sent.aclose()
            await self._parts.aclose()


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
