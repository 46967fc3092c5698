"""Client of the HTTP API of a fleet."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from contracts.errors import first_error
from contracts.replies import bounded_async_client
from contracts.rpc import connecting
from inference.errors import FleetError
from inference.fleet.face import KEY_VARIABLE
from inference.fleet.registry import Joined

_TIMEOUT_S = 30.0
_REPLY_BYTES = 64 << 20


def read_key(path: Path | None = None) -> str | None:
    """Key of a fleet: the first of `path`, else of the file $TRIPLANE_FLEET_KEY_FILE; None without either.

    Raises ConfigError.
    """
    return connecting.read_key(path) if path else connecting.read_named_key(KEY_VARIABLE)


def row_of(state: dict[str, Any], url: str) -> dict[str, Any]:
    """A replica in `Fleet.state`. Raises FleetError if it is not there."""
    for row in state["replicas"]:
        if row["url"] == url:
            return dict(row)
    raise FleetError(f"{url} has left the fleet")


class FleetClient:
    """Belongs to one event loop. Methods raise FleetError for a refusal, and if the router can't be reached."""

    def __init__(self, router: str, key: str | None = None) -> None:
        """router: URL of `python -m inference route`."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.router = router.rstrip("/").removesuffix("/v1")
        self._http = bounded_async_client(_REPLY_BYTES, headers=headers, timeout=_TIMEOUT_S, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def state(self) -> dict[str, Any]:
        """See Fleet.state."""
        return await self._call("GET", "/fleet")

    async def join(self, replica: Joined) -> None:
        """Begin or renew a lease."""
        await self._call("POST", "/fleet/join", replica.model_dump())

    async def leave(self, url: str, started: float) -> None:
        """End a lease."""
        await self._call("POST", "/fleet/leave", {"url": url, "started": started})

    async def drain(
        self,
        url: str,
        sessions_s: float,
        *,
        hold_s: float | None = None,
        token: str | None = None,
        replaces: str | None = None,
    ) -> dict[str, Any]:
        """Begin or renew a drain. replaces: see Registry.drain. Returns the state."""
        body = {"url": url, "sessions_s": sessions_s, "hold_s": hold_s, "token": token, "replaces": replaces}
        return await self._call("POST", "/fleet/drain", body)

    async def undrain(self, url: str, replaces: str | None = None) -> dict[str, Any]:
        """End a drain. replaces: see Registry.drain. Returns the state."""
        return await self._call("POST", "/fleet/drain", {"url": url, "undo": True, "replaces": replaces})

    async def end(self, session: str) -> None:
        """A session comes back no more."""
        await self._call("DELETE", f"/fleet/sessions/{quote(session, safe='')}")

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            reply = await self._http.request(method, f"{self.router}{path}", json=body)
        except (httpx.HTTPError, httpx.InvalidURL, ExceptionGroup) as error:
            # a group: of a port above 65535
            why = first_error(error) if isinstance(error, ExceptionGroup) else type(error).__name__
            raise FleetError(
                f"the router {self.router} can't be reached ({why}): start it, or correct --router"
            ) from None
        try:
            found = reply.json()
            if reply.is_success and isinstance(found, dict):
                return found
            raise FleetError(f"{self.router}: {found['error']['message']}")
        except (ValueError, KeyError, TypeError):
            raise FleetError(
                f"{self.router}{path} answered {reply.status_code}, which is no fleet's: correct --router"
            ) from None
