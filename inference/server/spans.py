"""Spans of the requests to an HTTP server, joined to the trace of whoever sent them."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from contracts import tracing


def spans_of(routes: Sequence[Route]) -> list[Middleware]:
    """Middleware with a span for each POST request to one of `routes`; none while tracing is off."""
    paths = {route.path for route in routes if "POST" in (route.methods or ())}
    return [Middleware(_Spans, paths=paths)] if tracing.is_on() else []


class _Spans:
    def __init__(self, app: ASGIApp, paths: set[str]) -> None:
        self._app, self._paths = app, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        sent = tracing.parent_of((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        path, status = scope["path"], 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                span.set({"http.response.status_code": status})
            await send(message)

        about = {"http.request.method": "POST", "http.route": path}
        with tracing.span(f"POST {path}", about, "server", parent=sent) as span:
            await self._app(scope, receive, sending)
            if status >= 500:
                span.fail(str(status))
