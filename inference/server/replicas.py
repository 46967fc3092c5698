"""The servers behind the router's HTTP face: which are well, and where they are.

resolve addresses --> GET /health of each --> serve, or left out with the fault --> again every WATCH_S seconds
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import httpx

from contracts.addresses import Address, resolve
from contracts.errors import InfraFault
from inference.router import Router
from inference.router.subscriber import Subscriptions

WATCH_S = 2.0
"""Seconds between two checks of the servers."""
CHECK_S = 10.0
"""Timeout of a check, in seconds."""
_log = logging.getLogger(__name__)


class Replicas:
    """Keeps the router's replicas to those that are well. Belongs to one event loop."""

    def __init__(
        self, addresses: Sequence[Address], router: Router, events: Subscriptions, client: httpx.AsyncClient
    ) -> None:
        """addresses: of the servers, names included."""
        self._addresses, self._router, self._events, self._client = addresses, router, events, client
        self.faults: dict[str, str] = {}
        """Servers that are left out, by URL, with the fault."""

    async def watch(self) -> None:
        """Check the servers until cancelled."""
        while True:
            await self.check()
            await asyncio.sleep(WATCH_S)

    async def check(self) -> None:
        """Check the servers once."""
        try:
            found = await asyncio.to_thread(resolve, self._addresses)
        except InfraFault as error:
            _log.warning("the servers' addresses can't be resolved, the known ones stay: %s", error)
            urls = [*self._router.replicas, *self.faults]
        else:
            urls = [each.url for each in found]
        for url in {*self._router.replicas, *self.faults} - set(urls):
            self._leave(url, "its address is gone")
            del self.faults[url]
        for url, fault in zip(urls, await asyncio.gather(*(self._fault(url) for url in urls)), strict=True):
            if fault is not None:
                self.leave_out(url, fault)
            elif url not in self._router.replicas:
                self.faults.pop(url, None)
                self._router.add(url)
                _log.info("%s serves", url)
        self._follow()

    def leave_out(self, url: str, fault: str) -> None:
        """Send nothing to a server until a check finds it well."""
        if url not in self.faults:
            _log.warning("%s is left out: %s", url, fault)
        self._leave(url, fault)
        self._follow()

    def _leave(self, url: str, fault: str) -> None:
        self.faults[url] = fault
        if url in self._router.replicas:
            self._router.remove(url)

    def _follow(self) -> None:
        self._events.sync({url: url for url in self._router.replicas})

    async def _fault(self, url: str) -> str | None:
        try:
            reply = await self._client.get(f"{url}/health", timeout=CHECK_S)
        except httpx.HTTPError as error:
            return f"no reply to GET /health ({type(error).__name__})"
        return None if reply.is_success else f"GET /health answered {reply.status_code}"
