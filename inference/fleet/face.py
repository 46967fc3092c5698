"""HTTP API of a fleet, beside the routed requests.

    GET    /fleet                                              state of replicas, leases, drains and pins
    POST   /fleet/join   {url, version, capacity, started, lease_s}     begin or renew a lease
    POST   /fleet/leave  {url, started}
    POST   /fleet/drain  {url, sessions_s, hold_s, token, replaces} or {url, undo: true, replaces}
    DELETE /fleet/sessions/NAME                                a session comes back no more

All but the first and the last ask for a key of the router's key file; without that file, for a client on this machine.
Bodies must be declared as JSON (`inference.server.bodies`).
"""

from __future__ import annotations

import hmac
import ipaddress
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from contracts.rpc.connecting import is_rebindable
from inference.errors import FleetError
from inference.fleet.fleet import Fleet
from inference.fleet.registry import Drain, Joined, check_url
from inference.server.bodies import read_json

KEY_VARIABLE = "TRIPLANE_FLEET_KEY_FILE"
"""Environment variable with the file whose first line is the key that clients send."""
SESSIONS_S = 300.0
"""Default seconds for which sessions may stay at a replica that drains."""
B = TypeVar("B", bound=BaseModel)


class LeaveRequest(BaseModel):
    """Body of POST /fleet/leave."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    started: float

    _url = field_validator("url")(check_url)


class DrainRequest(BaseModel):
    """Body of POST /fleet/drain."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    sessions_s: float = Field(default=SESSIONS_S, ge=0, le=7 * 86400)
    """Seconds for which the sessions that the replica has may stay."""
    hold_s: float | None = Field(default=None, gt=0, le=86400)
    """Seconds until the drain ends by itself; None: it stays until it is undone."""
    token: str | None = Field(default=None, max_length=64)
    """Name of the drain; that of one to renew, whose `sessions_s` is given again. None: a new one."""
    replaces: str | None = Field(default=None, max_length=64)
    """See Registry.drain. The reply tells what drain the replica has then."""
    undo: bool = False
    """Whether to end the drain."""

    _url = field_validator("url")(check_url)


class FleetFace:
    """Handlers over one fleet."""

    def __init__(self, fleet: Fleet, keys: Sequence[bytes] = ()) -> None:
        """keys: accepted bearer keys; empty: requests of this machine are accepted without one."""
        self._fleet, self._keys = fleet, keys

    def routes(self) -> list[Route]:
        """Routes for the router's application."""
        return [
            Route("/fleet", self._state),
            Route("/fleet/join", self._checked(Joined, self._join), methods=["POST"]),
            Route("/fleet/leave", self._checked(LeaveRequest, self._leave), methods=["POST"]),
            Route("/fleet/drain", self._checked(DrainRequest, self._drain), methods=["POST"]),
            Route("/fleet/sessions/{name:path}", self._end, methods=["DELETE"]),
        ]

    async def _state(self, request: Request) -> JSONResponse:
        return JSONResponse(self._fleet.state())

    async def _end(self, request: Request) -> JSONResponse:
        self._fleet.end(request.path_params["name"])
        return JSONResponse({})

    async def _join(self, body: Joined) -> None:
        await self._fleet.registry.join(body)
        if body.url not in self._fleet.replicas:
            await self._fleet.sync()

    async def _leave(self, body: LeaveRequest) -> None:
        await self._fleet.registry.leave(body.url, body.started)
        await self._fleet.sync()

    async def _drain(self, body: DrainRequest) -> None:
        if body.url not in self._fleet.replicas:
            known = ", ".join(self._fleet.replicas) or "none"
            raise FleetError(f"the fleet has no replica {body.url}: name one of {known}")
        drain = Drain(token=body.token or uuid.uuid4().hex, sessions_s=body.sessions_s, hold_s=body.hold_s)
        await self._fleet.registry.drain(body.url, None if body.undo else drain, body.replaces)
        await self._fleet.sync()

    def _checked(
        self, model: type[B], handler: Callable[[B], Awaitable[None]]
    ) -> Callable[[Request], Awaitable[JSONResponse]]:
        async def checked(request: Request) -> JSONResponse:
            if not self._may(request):
                said = f"the fleet asks for a key: set {KEY_VARIABLE} to a file with one of --fleet-key-file"
                return _error(401, said, "no_key")
            try:
                body = model.model_validate_json(await read_json(request))
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = ".".join(map(str, first["loc"])) or "the body"
                return _error(400, f"{where}: {first['msg'].removeprefix('Value error, ')}", "invalid_request")
            try:
                await handler(body)
            except FleetError as error:
                return _error(409, str(error), "fleet_refuses")
            return JSONResponse(self._fleet.state())

        return checked

    def _may(self, request: Request) -> bool:
        if self._keys:
            given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
            return any(hmac.compare_digest(given, key) for key in self._keys)
        try:
            here = request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
            return here and not is_rebindable(request.headers.get("host", ""))
        except ValueError:
            return False


def _error(status: int, message: str, code: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "fleet", "param": None, "code": code}}, status)
