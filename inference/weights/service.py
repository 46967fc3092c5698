"""HTTP API of the weights service.

    POST /pull {digest, key, kind, plain, wait_s}   200 {directory}            the checkpoint is there and verified
                                                    202 {done, total}          still pulling: ask again
    GET  /held                                      200 {folder, held: [...]}
    GET  /health                                    200, without a key

Requests for one checkpoint share its download, which goes on if their clients disconnect. Checkpoints are pulled one
after the other.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from contracts.artifacts import ArtifactRef
from contracts.errors import ArtifactCorrupt, ArtifactMissing, SchemaError, TriplaneError
from contracts.store import Store
from inference.errors import BadRequest
from inference.server.bodies import read_json
from inference.weights.folder import NoSpace, WeightsFolder

_DIGEST = r"^[0-9a-f]{64}$"
_log = logging.getLogger(__name__)


class PullRequest(BaseModel):
    """Body of POST /pull."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str = Field(pattern=_DIGEST)
    """Content digest of the checkpoint."""
    key: str = Field(pattern=_DIGEST)
    """Action key of the checkpoint."""
    kind: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    """Kind of its artifact."""
    plain: bool = False
    """Whether to make float32 weights of it."""
    wait_s: float = Field(default=20.0, ge=0, le=60)
    """Seconds until an incomplete pull is answered with 202."""


@dataclass
class _Pull:
    """A pull in progress."""

    done: int = 0
    total: int = 0
    task: asyncio.Task[Path] = field(init=False)


class Service:
    """Handlers over one folder and one store."""

    def __init__(self, folder: WeightsFolder, store: Store, keys: tuple[bytes, ...] = ()) -> None:
        """keys: accepted bearer keys; empty accepts every request."""
        self._folder, self._store, self._keys = folder, store, keys
        self._pulls: dict[tuple[str, bool], _Pull] = {}
        self._turn = asyncio.Lock()

    def starlette(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/health", self._health),
            Route("/held", self._with_key(self._held)),
            Route("/pull", self._with_key(self._pull), methods=["POST"]),
        ]
        return Starlette(routes=routes, exception_handlers={TriplaneError: _explain})

    def _with_key(
        self, handler: Callable[[Request], Awaitable[JSONResponse]]
    ) -> Callable[[Request], Awaitable[JSONResponse]]:
        async def checked(request: Request) -> JSONResponse:
            given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
            if self._keys and not any(hmac.compare_digest(given, key) for key in self._keys):
                return _error(401, "this service asks for a key: set TRIPLANE_WEIGHTS_KEY_FILE", "no_key")
            return await handler(request)

        return checked

    async def _health(self, request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def _held(self, request: Request) -> JSONResponse:
        held = await asyncio.to_thread(self._folder.held)
        free = shutil.disk_usage(self._folder.folder).free
        body = {"folder": str(self._folder.folder), "free": free, "held": [asdict(each) for each in held]}
        return JSONResponse(body)

    async def _pull(self, request: Request) -> JSONResponse:
        try:
            body = PullRequest.model_validate_json(await read_json(request))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the body"
            return _error(400, f"{where}: {first['msg']}", "invalid_request")
        pull = self._joined(body)
        done, _ = await asyncio.wait({pull.task}, timeout=body.wait_s)
        if not done:
            return JSONResponse({"done": pull.done, "total": pull.total}, status_code=202)
        return JSONResponse({"directory": str(pull.task.result())})

    def _joined(self, body: PullRequest) -> _Pull:
        """The pull of this checkpoint in progress, or a new one."""
        place = (body.digest, body.plain)
        pull = self._pulls.get(place)
        if pull is None:
            pull = self._pulls[place] = _Pull()
            pull.task = asyncio.create_task(self._work(body, pull))
            pull.task.add_done_callback(lambda task: self._ended(place, task))
        return pull

    async def _work(self, body: PullRequest, pull: _Pull) -> Path:
        def progress(done: int, total: int) -> None:
            pull.done, pull.total = done, total

        ref = ArtifactRef(kind=body.kind, key=body.key, digest=body.digest)
        async with self._turn:
            return await asyncio.to_thread(
                lambda: self._folder.pull(self._store, ref, plain=body.plain, progress=progress)
            )

    def _ended(self, place: tuple[str, bool], task: asyncio.Task[Path]) -> None:
        self._pulls.pop(place)
        if not task.cancelled() and task.exception() is not None:
            _log.warning("checkpoint %s was not pulled: %s", place[0][:12], task.exception())


async def _explain(request: Request, error: Exception) -> JSONResponse:
    match error:
        case ArtifactMissing():
            return _error(404, str(error), "missing")
        case ArtifactCorrupt() | SchemaError():
            return _error(422, str(error), "corrupt")
        case NoSpace():
            return _error(507, str(error), "no_space")
        case BadRequest():
            return _error(400, str(error), "invalid_request")
    return _error(502, str(error), "store")


def _error(status: int, message: str, code: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": code}}, status_code=status)
