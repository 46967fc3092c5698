"""HTTP face of the router: each request goes to the server that has most of its prompt cached.

request --> prompt (prompts) --> Router.choose --> the same request at a server (replicas) --> its reply, as it comes

Bodies are passed on unchanged in both directions, streams included. A request whose server fails before it begins to
reply is sent to another one: nobody has seen a token of it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from contracts.addresses import parse_addresses
from contracts.errors import TriplaneError
from inference.router import Decision, Namespace, Router, RouterConfig
from inference.router.shared import SharedRouter
from inference.router.subscriber import Subscriptions
from inference.server.draining import DrainingServer
from inference.server.listening import announced, beside, split_address
from inference.server.prompts import Asked, asked
from inference.server.readiness import Readiness
from inference.server.replicas import Replicas
from inference.server.replies import disconnected, error_reply, explain
from inference.server.route_metrics import Look, RouteMetrics

PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
"""Requests that are routed by their prompt."""
SESSION, GROUP, REPLICA = "x-session", "x-group", "x-replica"
"""Headers: name of a conversation, name of requests with a common prompt, and in replies the server's URL."""
TRIES = 3
"""Servers that one request is sent to."""
_HOPS = {"connection", "content-length", "host", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer"}
"""Headers of one connection, which are not passed on."""
_UNWELL = (502, 503, 504)
"""Statuses of a server that is draining, withdrawn or behind a broken proxy: another one is asked."""
_TAIL = 4096
"""Bytes at the end of a reply in which its usage is looked for."""


@dataclass(frozen=True)
class Routing:
    """How requests are routed."""

    replicas: str
    """Addresses of the servers, separated by commas: URLs without path, or dns:NAME:PORT."""
    listen: str
    """host:port; port 0 picks a free one."""
    block_tokens: int = 16
    """Block size of the servers' prefix caches."""
    events_port: int | None = None
    """Port at each server's host where its cache events are published. None: assume what a server has cached."""
    metrics: bool = False
    """Whether /metrics answers."""
    redis: str | None = None
    """URL of the Redis server through which several routers share their state. None: nothing is shared."""
    fleet: str = "default"
    """Name of the group of routers that share their state."""
    timeout_s: float = 600.0
    """Longest silence of a server within a reply, in seconds."""
    drain_s: float = 0.0
    """Seconds in which requests are still accepted after SIGTERM."""


class RouterFace:
    """Handlers that share one router. Belongs to one event loop."""

    def __init__(self, routing: Routing) -> None:
        """Raises ConfigError for bad addresses, and without the packages that metrics, events and Redis need."""
        self._router = Router(Namespace(""), RouterConfig(block_tokens=routing.block_tokens))
        self._events = Subscriptions(self._router, routing.events_port)
        self.shared = None if routing.redis is None else SharedRouter(self._router, routing.redis, routing.fleet)
        if self.shared is not None:
            self._events.forward = self.shared.forward
        timeout = httpx.Timeout(routing.timeout_s, connect=10.0, pool=None)
        # no idle connections: httpx compares each of them with all others at every request
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
        addresses = parse_addresses(routing.replicas, "--replica")
        self.replicas = Replicas(addresses, self._router, self._events, self._client)
        self.readiness = Readiness()
        self._metrics = RouteMetrics(self._look) if routing.metrics else None

    def starlette(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/v1/models", self._models),
            *(Route(path, self._route, methods=["POST"]) for path in PATHS),
        ]
        if self._metrics is not None:
            routes.append(Route("/metrics", self._scrape))
        return Starlette(routes=routes, exception_handlers={TriplaneError: explain, Exception: explain})

    @property
    def serving(self) -> list[str]:
        """URLs of the servers that are well."""
        return self._router.replicas

    async def close(self) -> None:
        """Close the connections."""
        await self._events.close()
        if self.shared is not None:
            await self.shared.close()
        await self._client.aclose()

    async def _health(self, request: Request) -> JSONResponse:
        serving = self.serving
        body = {"status": "ok" if serving else "no server is well", "serving": serving, "out": self.replicas.faults}
        return JSONResponse(body, 200 if serving else 503)

    async def _ready(self, request: Request) -> JSONResponse:
        if self.readiness.draining:
            return JSONResponse({"reason": self.readiness.reason(None)}, 503)
        return await self._health(request)

    async def _models(self, request: Request) -> Response:
        for url in self._router.replicas:
            try:
                reply = await self._client.get(f"{url}/v1/models")
            except httpx.HTTPError as error:
                self.replicas.leave_out(url, type(error).__name__)
                continue
            return Response(reply.content, reply.status_code, media_type=reply.headers.get("content-type"))
        return self._nobody()

    async def _scrape(self, request: Request) -> Response:
        assert self._metrics is not None, "routed only then"
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _route(self, request: Request) -> Response:
        content = await request.body()
        wanted = asked(content)
        work = asyncio.ensure_future(self._sent(request, content, wanted))
        gone = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            return await work if work.done() else error_reply(499, "the client disconnected", "cancelled")
        finally:
            work.cancel()
            gone.cancel()

    async def _sent(self, request: Request, content: bytes, wanted: Asked) -> Response:
        """Reply of the first server that begins to reply."""
        began = time.monotonic()
        for attempt in range(1, TRIES + 1):
            if not self._router.replicas:
                break
            decision = self._router.choose(
                wanted.prompt,
                max_tokens=wanted.max_tokens,
                session=request.headers.get(SESSION),
                group=request.headers.get(GROUP),
            )
            self._router.begin(decision)
            try:
                reply = await self._asked(decision.replica, request, content)
            except httpx.HTTPError as error:
                self.replicas.leave_out(decision.replica, f"a request failed ({type(error).__name__})")
            except BaseException:
                self._router.finish(decision)
                raise
            else:
                if reply.status_code not in _UNWELL or attempt == TRIES or len(self._router.replicas) == 1:
                    return self._passed(request.url.path, decision, reply, began)
                await reply.aclose()
                self.replicas.leave_out(decision.replica, f"a request was answered {reply.status_code}")
            self._router.finish(decision)
            if self._metrics is not None:
                self._metrics.repeats.inc()
        return self._nobody()

    async def _asked(self, url: str, request: Request, content: bytes) -> httpx.Response:
        headers = [(name, value) for name, value in request.headers.items() if name not in _HOPS]
        sent = self._client.build_request("POST", f"{url}{request.url.path}", content=content, headers=headers)
        return await self._client.send(sent, stream=True)

    def _passed(self, path: str, decision: Decision, reply: httpx.Response, began: float) -> Response:
        """The reply of a server, passed on as it comes."""
        headers = {name: value for name, value in reply.headers.items() if name not in _HOPS}
        headers[REPLICA] = decision.replica
        tail, whole = b"", False

        async def body() -> AsyncIterator[bytes]:
            nonlocal tail, whole
            try:
                async for chunk in reply.aiter_raw():
                    tail = (tail + chunk)[-_TAIL:]
                    yield chunk
                whole = True
            except httpx.HTTPError as error:
                self.replicas.leave_out(decision.replica, f"a reply broke off ({type(error).__name__})")
                raise

        async def over() -> None:
            seconds = time.monotonic() - began
            self._router.finish(
                decision, seconds=seconds if whole and reply.is_success else None, sampled=_sampled(tail)
            )
            self._count(path, decision, str(reply.status_code), seconds)
            await reply.aclose()

        return _Passed(body(), reply.status_code, headers, over)

    def _count(self, path: str, decision: Decision, code: str, seconds: float) -> None:
        if self._metrics is not None:
            self._metrics.requests.labels(decision.replica, code).inc()
            self._metrics.seconds.labels(path).observe(seconds)
            self._metrics.prompt_tokens.inc(decision.prompt)
            self._metrics.cached_tokens.inc(decision.cached)

    def _nobody(self) -> Response:
        if self._metrics is not None:
            self._metrics.requests.labels("none", "503").inc()
        faults = "; ".join(f"{url}: {fault}" for url, fault in self.replicas.faults.items())
        said = f"no server is well ({faults or 'none is known yet'}): start one, or correct --replica"
        return error_reply(503, said, "no_server", kind="server_error")

    def _look(self) -> Look:
        counters = self._router.residency.counters
        return Look(
            {"serving": len(self._router.replicas), "out": len(self.replicas.faults)},
            self._router.flying(),
            {"applied": counters.applied, "lost": counters.lost},
            {} if self.shared is None else vars(self.shared.counters),
        )


class _Passed(StreamingResponse):
    """A stream after which `over` is called, also if its client leaves before it begins."""

    def __init__(
        self, body: AsyncIterator[bytes], status: int, headers: dict[str, str], over: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(body, status, headers)
        self._over = over

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._over()


def _sampled(tail: bytes) -> int:
    """Tokens that a reply says it sampled, 0 if it says nothing."""
    _, found, rest = tail.rpartition(b'"completion_tokens"')
    if not found:
        return 0
    try:
        value, _ = json.JSONDecoder().raw_decode(rest.decode(errors="replace").lstrip(" :"))
    except ValueError:
        return 0
    return value if isinstance(value, int) else 0


def route(routing: Routing) -> None:
    """Route requests until a signal. Prints the address when each server was checked once."""
    split_address(routing.listen)
    asyncio.run(_run(routing))


async def _run(routing: Routing) -> None:
    host, port = split_address(routing.listen)
    face = RouterFace(routing)
    server = DrainingServer(face.starlette(), host, port, face.readiness, routing.drain_s)
    try:
        await face.replicas.check()
        if face.shared is not None:
            await face.shared.start()
        async with beside(server, face.replicas.watch()), beside(server, _announce(server, face)):
            await server.run_until_told()
    finally:
        await face.close()


async def _announce(server: DrainingServer, face: RouterFace) -> None:
    host, port = await announced(server)
    known = len(face.replicas.faults) + len(face.serving)
    print(f"{len(face.serving)} of {known} servers at http://{host}:{port}/v1", flush=True)
