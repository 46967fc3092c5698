"""HTTP face of the router: each request goes to the server that has most of its prompt cached.

request --> prompt (prompts) --> Fleet.choose --> the same request at a server --> its reply, as it comes

Bodies are passed on unchanged in both directions, streams included. A request whose server fails before it begins to
reply is sent to another one: nobody has seen a token of it. The reply to a request that is pinned to a policy version
is passed on as a whole, once it is proven to have tokens of that version only.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from contracts.addresses import parse_addresses
from contracts.errors import TriplaneError
from contracts.rpc.connecting import read_keys
from contracts.tracing import carrier, service
from inference.errors import BadRequest
from inference.fleet import events
from inference.fleet.events import Event, Webhook
from inference.fleet.face import FleetFace
from inference.fleet.fleet import Fleet, Sent
from inference.fleet.pools import Pools, Wanted
from inference.fleet.probe import VERSION, InvalidReply, get, served_version
from inference.fleet.registry import LocalRegistry
from inference.fleet.shared_registry import SharedRegistry
from inference.router import Decision
from inference.server.bodies import read_body
from inference.server.draining import DrainingServer
from inference.server.listening import announced, beside, split_address
from inference.server.prompts import Asked, asked
from inference.server.readiness import Readiness
from inference.server.replies import disconnected, error_reply, explain
from inference.server.route_metrics import Look, RouteMetrics
from inference.server.spans import spans_of

PATHS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")
"""Requests that are routed by their prompt."""
SESSION, GROUP, REPLICA = "x-session", "x-group", "x-replica"
"""Headers: name of a conversation, name of requests with a common prompt, and in replies the server's URL."""
NAME_CHARACTERS = 256
"""Longest name of a session or group."""
TRIES = 3
"""Servers that one request is sent to."""
_HOPS = {"connection", "content-length", "host", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer"}
"""Headers of one connection, which are not passed on."""
_ENCODING = "accept-encoding"
_UNWELL = (502, 503, 504)
"""Statuses of a server that is draining, withdrawn or behind a broken proxy: another one is asked."""
HELD_BYTES = 256 << 20
"""Longest reply that is read before it is passed on: one to a pinned request, or one with a status of `_UNWELL`."""
_TAIL = 4096
"""Bytes at the end of a reply in which its usage is looked for."""
_MOST_SAMPLED = 2**31
"""Bound of the tokens that one reply has."""


@dataclass(frozen=True)
class Routing:
    """How requests are routed."""

    replicas: str
    """Addresses of servers without a lease, separated by commas: URLs without path, or dns:NAME:PORT. Empty: none."""
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
    fleet_key_file: Path | None = None
    """File with the keys that joining, draining and updating ask for. None: this machine may do it without."""
    webhook: str | None = None
    """URL that is told of each change of the fleet."""
    scaler: str | None = None
    """host:port of KEDA's external scaler. None: it is not served."""


class RouterFace:
    """Handlers that share one router. Belongs to one event loop."""

    def __init__(self, routing: Routing) -> None:
        """Raises ConfigError for bad addresses, and without the packages that metrics, events and Redis need."""
        timeout = httpx.Timeout(routing.timeout_s, connect=10.0, pool=None)
        # no idle connections: httpx compares each of them with all others at every request
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False)
        addresses = parse_addresses(routing.replicas, "--replica") if routing.replicas else []
        registry = LocalRegistry() if routing.redis is None else SharedRegistry(routing.redis, routing.fleet)
        pools = Pools(
            block_tokens=routing.block_tokens,
            events_port=routing.events_port,
            redis=routing.redis,
            fleet=routing.fleet,
        )
        self.fleet = Fleet(addresses, registry, pools, self._client)
        self._face = FleetFace(self.fleet, read_keys(routing.fleet_key_file) if routing.fleet_key_file else ())
        self.webhook = None if routing.webhook is None else Webhook(routing.webhook, routing.fleet, self._client)
        self.fleet.tell = self._tell
        self.readiness = Readiness()
        self._metrics = RouteMetrics(self._look) if routing.metrics else None

    def starlette(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/v1/models", self._models),
            *(Route(path, self._route, methods=["POST"]) for path in PATHS),
            *self._face.routes(),
        ]
        if self._metrics is not None:
            routes.append(Route("/metrics", self._scrape))
        handlers = {TriplaneError: explain, Exception: explain}
        return Starlette(routes=routes, middleware=spans_of(routes), exception_handlers=handlers)

    async def close(self) -> None:
        """Close the connections."""
        await self.fleet.close()
        await self._client.aclose()

    def _tell(self, event: Event) -> None:
        events.log(event)
        if self.webhook is not None:
            self.webhook.tell(event)

    async def _health(self, request: Request) -> JSONResponse:
        serving = self.fleet.serving
        body = {"status": "ok" if serving else "no server is well", "serving": serving, "out": self.fleet.faults}
        return JSONResponse(body, 200 if serving else 503)

    async def _ready(self, request: Request) -> JSONResponse:
        if self.readiness.draining:
            return JSONResponse({"reason": self.readiness.reason(None)}, 503)
        return await self._health(request)

    async def _models(self, request: Request) -> Response:
        for url in self.fleet.serving:
            try:
                reply, content = await get(self._client, f"{url}/v1/models")
            except httpx.HTTPError as error:
                self._failed(url, error, "GET /v1/models")
                continue
            return Response(content, reply.status_code, media_type=reply.headers.get("content-type"))
        return self._nobody()

    async def _scrape(self, request: Request) -> Response:
        assert self._metrics is not None, "routed only then"
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _route(self, request: Request) -> Response:
        for name in (SESSION, GROUP):
            if len(request.headers.get(name, "")) > NAME_CHARACTERS:
                raise BadRequest(f"the header {name} is longer than {NAME_CHARACTERS} characters: shorten the name")
        content = await read_body(request)
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
        """Reply of the first server that begins to reply, or for a pinned request, of the first whose reply is proven.

        That of the last one tried is passed on, whatever it is, unless it has tokens of another version.
        """
        began, pin = time.monotonic(), request.headers.get(VERSION) or None
        routed = Wanted(wanted.prompt, wanted.max_tokens, request.headers.get(SESSION), request.headers.get(GROUP))
        tried: list[str] = []
        refusal: Response | None = None
        for _ in range(TRIES):
            sent = self.fleet.choose(routed, pin=pin, version=wanted.version, tried=tried)
            if sent is None:
                break
            if refusal is not None:
                self._repeated()
            url = sent.replica.url
            tried.append(url)
            try:
                reply = await self._asked(url, request, content)
                if reply.status_code in _UNWELL:
                    refusal = await _whole(reply, url)
                    self._count(request.url.path, sent.decision, str(reply.status_code), time.monotonic() - began)
                    self.fleet.failed(url, f"a request was answered {reply.status_code}")
                elif pin is None:
                    return self._passed(request.url.path, sent, reply, began)
                else:
                    found = await _whole(reply, url)
                    if await self._is_proven(url, reply, bytes(found.body), pin):
                        self._over(request.url.path, sent, reply, bytes(found.body), began)
                        return found
                    refusal = None
                    await self.fleet.refresh(url)
            except httpx.LocalProtocolError as error:  # the client's fault: the request was not sent
                self.fleet.finish(sent)
                raise BadRequest(f"a header can't be passed on ({error}): correct it, or leave it out") from None
            except httpx.HTTPError as error:
                refusal = None
                self._failed(url, error, "a request")
            except BaseException:
                self.fleet.finish(sent)
                raise
            self.fleet.finish(sent)
        return refusal if refusal is not None else self._nobody(pin)

    async def _asked(self, url: str, request: Request, content: bytes) -> httpx.Response:
        ours = carrier()
        if VERSION in request.headers:  # the reply is read
            ours = {**ours, _ENCODING: "identity"}
        left_out = {name.encode() for name in (*_HOPS, *ours)}
        # not all are ASCII; parsers of requests keep blanks at the end, which httpx refuses to send
        headers = [(name, value.strip()) for name, value in request.headers.raw if name not in left_out]
        headers += [(name.encode(), value.encode()) for name, value in ours.items()]
        sent = self._client.build_request("POST", f"{url}{request.url.path}", content=content, headers=headers)
        return await self._client.send(sent, stream=True)

    async def _is_proven(self, url: str, reply: httpx.Response, content: bytes, pin: str) -> bool:
        """Whether the tokens of a reply, if it has any, are all of version `pin`.

        Ours says so in a header. Of another server the versions in its reply must be that one, and so must be the one
        that it serves after the reply, as it was before the request.
        """
        if not reply.is_success:
            return reply.status_code != httpx.codes.CONFLICT
        if VERSION in reply.headers:
            return reply.headers[VERSION] == pin
        if _versions(content) - {pin}:
            return False
        return await served_version(self._client, url) == pin

    def _passed(self, path: str, sent: Sent, reply: httpx.Response, began: float) -> Response:
        """The reply of a server, passed on as it comes."""
        tail, whole = b"", False

        async def body() -> AsyncIterator[bytes]:
            nonlocal tail, whole
            try:
                async for chunk in reply.aiter_raw():
                    tail = (tail + chunk)[-_TAIL:]
                    yield chunk
                whole = True
            except httpx.HTTPError as error:
                self._failed(sent.replica.url, error, "a reply")
                raise

        async def over() -> None:
            try:
                self._over(path, sent, reply, tail, began, whole=whole)
            finally:
                await reply.aclose()

        return _Passed(body(), reply.status_code, _headers(reply, sent.replica.url), over)

    def _over(
        self, path: str, sent: Sent, reply: httpx.Response, tail: bytes, began: float, *, whole: bool = True
    ) -> None:
        """A reply was passed on. tail: its end. whole: not broken off."""
        seconds = time.monotonic() - began
        learned = seconds if whole and reply.is_success else None
        self.fleet.finish(sent, seconds=learned, sampled=_sampled(tail))
        self._count(path, sent.decision, str(reply.status_code), seconds)

    def _failed(self, url: str, error: httpx.HTTPError, what: str) -> None:
        away = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
        self.fleet.failed(url, f"{what} failed ({type(error).__name__})", away=away)

    def _repeated(self) -> None:
        if self._metrics is not None:
            self._metrics.repeats.inc()

    def _count(self, path: str, decision: Decision, code: str, seconds: float) -> None:
        if self._metrics is not None:
            self._metrics.requests.labels(decision.replica, code).inc()
            self._metrics.seconds.labels(path).observe(seconds)
            self._metrics.prompt_tokens.inc(decision.prompt)
            self._metrics.cached_tokens.inc(decision.cached)

    def _nobody(self, pin: str | None = None) -> Response:
        served = self.fleet.versions
        if pin is not None and (served or self.fleet.serving):
            said = f"no replica serves policy {pin}: {', '.join(served) or 'none says which it serves'}"
            return error_reply(409, f"{said}; name one of these, or begin the session anew", "stale_policy_version")
        if self._metrics is not None:
            self._metrics.requests.labels("none", "503").inc()
        faults = "; ".join(f"{url}: {fault}" for url, fault in self.fleet.faults.items())
        draining = [url for url, each in self.fleet.replicas.items() if each.drain is not None]
        known = "; ".join(each for each in (faults, f"draining: {', '.join(draining)}" if draining else "") if each)
        said = f"no server is well ({known or 'none is known yet'}): start one, or correct --replica"
        return error_reply(503, said, "no_server", kind="server_error")

    def _look(self) -> Look:
        pools = list(self.fleet.pools)
        counters = [pool.router.residency.counters for pool in pools]
        shared: Counter[str] = Counter()
        for pool in pools:
            if pool.shared is not None:
                shared.update(vars(pool.shared.counters))
        return Look(
            {"serving": len(self.fleet.serving), "out": len(self.fleet.faults)},
            {url: tokens for pool in pools for url, tokens in pool.router.flying().items()},
            {"applied": sum(each.applied for each in counters), "lost": sum(each.lost for each in counters)},
            shared,
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


def _headers(reply: httpx.Response, url: str) -> dict[str, str]:
    """Headers of a reply to pass on."""
    reply.headers.encoding = "latin-1"  # as Starlette encodes them
    return {**{name: value for name, value in reply.headers.items() if name not in _HOPS}, REPLICA: url}


async def _whole(reply: httpx.Response, url: str) -> Response:
    """A reply, read to its end. Raises httpx.HTTPError, which is InvalidReply for one over HELD_BYTES."""
    content = bytearray()
    try:
        async for chunk in reply.aiter_raw():
            content += chunk
            if len(content) > HELD_BYTES:
                raise InvalidReply(f"its reply has more than {HELD_BYTES >> 20} MiB")
    finally:
        await reply.aclose()
    return Response(bytes(content), reply.status_code, _headers(reply, url))


def _versions(content: bytes) -> set[str]:
    """Policy versions with which a server marked the tokens of a reply."""
    try:
        choices: Any = json.loads(content)["choices"]
        return {str(mark["version"]) for choice in choices for mark in choice.get("weight_versions") or []}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()


def _sampled(tail: bytes) -> int:
    """Tokens that a reply says it sampled, 0 if it says no number in [0, 2**31)."""
    _, found, rest = tail.rpartition(b'"completion_tokens"')
    if not found:
        return 0
    try:
        value, _ = json.JSONDecoder().raw_decode(rest.decode(errors="replace").lstrip(" :"))
    except (ValueError, RecursionError):
        return 0
    return value if type(value) is int and 0 <= value < _MOST_SAMPLED else 0


def route(routing: Routing) -> None:
    """Route requests until a signal. Prints the address when each server was checked once."""
    split_address(routing.listen)
    with service("router"):
        asyncio.run(_run(routing))


async def _run(routing: Routing) -> None:
    host, port = split_address(routing.listen)
    face = RouterFace(routing)
    server = DrainingServer(face.starlette(), host, port, face.readiness, routing.drain_s)
    try:
        await face.fleet.start()
        async with AsyncExitStack() as stack:
            for work in (face.fleet.watch(), _announce(server, face)):
                await stack.enter_async_context(beside(server, work))
            if face.webhook is not None:
                await stack.enter_async_context(beside(server, face.webhook.run()))
            if routing.scaler is not None:
                from inference.fleet.scaler import serve_scaler  # imports grpc

                await stack.enter_async_context(beside(server, serve_scaler(face.fleet, routing.scaler)))
            await server.run_until_told()
    finally:
        await face.close()


async def _announce(server: DrainingServer, face: RouterFace) -> None:
    here = (await announced(server)).url
    print(f"{len(face.fleet.serving)} of {len(face.fleet.replicas)} servers at {here}/v1", flush=True)
