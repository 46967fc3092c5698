"""Changes of a fleet, logged and sent to a webhook."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import asdict, dataclass, field
from typing import Literal

import httpx

from contracts.addresses import is_http_url
from contracts.errors import ConfigError
from contracts.retries import backoff_s

Kind = Literal["joined", "left", "well", "away", "faulty", "ejected", "draining", "undrained", "version"]
WAITING = 1000
"""Events that wait for the webhook at most; beyond it the oldest are dropped."""
TRIES = 5
"""Attempts to send one event."""
_TIMEOUT_S = 10.0
_LONGEST_S = 30.0
_WARNED = {"left", "away", "faulty", "ejected"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """Something happened to a replica."""

    event: Kind
    url: str
    reason: str = ""
    at: float = field(default_factory=time.time)
    """Unix time."""


def log(event: Event) -> None:
    """Write an event to the log."""
    level = logging.WARNING if event.event in _WARNED else logging.INFO
    _log.log(level, "%s: %s%s", event.url, event.event, f" ({event.reason})" if event.reason else "")


class Webhook:
    """Posts events as JSON, in their order: {"event", "url", "reason", "at", "fleet"}. Belongs to one event loop."""

    def __init__(self, url: str, fleet: str, client: httpx.AsyncClient) -> None:
        """url: of the webhook. fleet: name that the events carry. Raises ConfigError for what is no URL."""
        if not is_http_url(url):
            raise ConfigError(f"--webhook {url!r} is not a URL: write http://host:port/path")
        self._url, self._fleet, self._client = url, fleet, client
        self._waiting: asyncio.Queue[Event] = asyncio.Queue(WAITING)
        self._away = False
        self.dropped = 0
        """Events that were not sent."""

    def tell(self, event: Event) -> None:
        """Send an event, in the background."""
        if self._waiting.full():
            self._waiting.get_nowait()
            self._lost("too many events wait")
        self._waiting.put_nowait(event)

    async def run(self) -> None:
        """Send events until cancelled."""
        while True:
            event = await self._waiting.get()
            for attempt in range(1, TRIES + 1):
                fault = await self._sent(event)
                if fault is None:
                    self._away = False
                    break
                if attempt == TRIES:
                    self._lost(fault)
                else:
                    await asyncio.sleep(backoff_s(attempt, 0.5, _LONGEST_S))

    async def _sent(self, event: Event) -> str | None:
        """Send once. Returns the fault; a webhook that refuses an event has it."""
        try:
            about = {**asdict(event), "fleet": self._fleet}
            async with self._client.stream("POST", self._url, json=about, timeout=_TIMEOUT_S) as reply:
                pass  # its body is not read
        except httpx.HTTPError as error:
            return f"no reply ({type(error).__name__})"
        return f"it answered {reply.status_code}" if reply.is_server_error or reply.status_code == 429 else None

    def _lost(self, fault: str) -> None:
        self.dropped += 1
        if not self._away:
            self._away = True
            _log.warning("the webhook misses events (%s); said once until one is sent", fault)
