"""Connections of our HTTP servers (uvicorn) with timeouts for clients and a limit on the size of request headers.

Without them, any client that reaches the port can keep connections open until the server has no file descriptors left,
or fill its memory with a header that never ends.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_S = 20.0
"""Timeout of a request's headers in seconds, from the start of the connection or the end of the last response."""
SILENT_S = 60.0
"""Timeout between two parts of a request's body, in seconds."""
UNREAD_S = 600.0
"""Timeout of a client that reads nothing of its response, in seconds."""
HEAD_BYTES = 64 * 1024
"""Maximum size of a request's headers, and of trailers after its body, in bytes."""
_Base: Any = AutoHTTPProtocol
_IS_H11 = not hasattr(_Base, "on_headers_complete")
"""Whether uvicorn parses with h11, which limits headers itself, instead of httptools."""


class BoundedConnection(_Base):  # type: ignore[misc]
    """`http` of uvicorn's Config."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._since = self._heard = self._read = self.loop.time()
        self._unparsed, self._stuck = 0, False
        self._timer = self.loop.call_later(HEAD_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._heard = self.loop.time()
        self._unparsed += len(data)
        super().data_received(data)
        if self._unparsed > HEAD_BYTES and not _IS_H11:
            self.send_400_response(f"The head of a request has at most {HEAD_BYTES} bytes.")

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._unparsed = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._unparsed = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        """See uvicorn."""
        self._since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self._stuck, self._read = True, self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self._stuck = False
        super().resume_writing()

    def _look(self) -> None:
        """Close the connection if one of its timeouts has passed; otherwise check again later."""
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            return  # a websocket's
        now, cycle = self.loop.time(), self.cycle
        if self._stuck:
            late = now >= self._read + UNREAD_S
        elif cycle is None or cycle.response_complete:
            late = now >= self._since + HEAD_S
        else:
            late = cycle.more_body and not self.flow.read_paused and now >= self._heard + SILENT_S
        if late:
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(HEAD_S / 4, self._look)
