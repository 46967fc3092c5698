"""Drain a server that was told to end: refuse new work, and wait for what runs."""

from __future__ import annotations

import asyncio
import logging
import time

from envd.server.sandboxes import Sandboxes
from envd.server.verifications import Verifications

_LOOK_S = 0.1
_log = logging.getLogger("envd")


async def drain(sandboxes: Sandboxes, verifications: Verifications, seconds: float, stop: asyncio.Event) -> None:
    """Refuse new sandboxes and verifications, and return when those that run have ended, after `seconds` at the latest.

    stop: set by another signal, which ends the wait.
    """
    sandboxes.draining = True
    stop.clear()
    _log.warning("draining: %d sandboxes may end within %g s, new ones are refused", len(sandboxes), seconds)
    deadline = time.monotonic() + seconds
    while not (sandboxes.idle and verifications.idle) and time.monotonic() < deadline and not stop.is_set():
        await asyncio.sleep(_LOOK_S)
    if len(sandboxes):
        _log.warning("drained for %g s: %d sandboxes still live and are ended", seconds, len(sandboxes))
