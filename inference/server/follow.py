"""Follow the live policy: poll, and swap when it changes.

    source() -> version, directory          same version: nothing to do
        |
    Application.swap ---- fails ---> withdrawn, tried again at the next look

If the source fails (e.g. its store is unreachable), the server keeps its policy, which may be current. Before the first
policy it waits.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from contracts.errors import ArtifactMissing, TriplaneError
from inference.server.app import Application

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """The policy to serve."""

    version: str
    directory: Callable[[], Path]
    """Fetches and verifies the checkpoint; called only to load it. Raises TriplaneError."""


Source = Callable[[], Wanted]
"""Returns the live policy. Raises TriplaneError. Called in a thread."""


async def follow(app: Application, source: Source, poll_s: float, wait_s: float = math.inf) -> None:
    """Keep `app` on the policy of `source` until canceled. poll_s: seconds between two polls.

    wait_s: longest wait for the first policy. Raises ArtifactMissing after it.
    """
    said, began = "", time.monotonic()
    while True:
        fault = await _look(app, source)
        waits = await app.version() is None
        if waits:
            app.readiness.waiting = fault
            if time.monotonic() - began > wait_s:
                raise ArtifactMissing(f"no policy to serve after {wait_s:g} s ({fault}): make one, or raise --wait")
        if fault and fault != said:
            _log.warning("%s; trying again every %g s", fault, poll_s)
        said = fault
        await asyncio.sleep(poll_s)


async def _look(app: Application, source: Source) -> str:
    """Poll once. Returns an error message, or an empty one."""
    served = await app.version()
    try:
        wanted = await asyncio.to_thread(source)
    except TriplaneError as error:
        return f"{'waiting for the first policy' if served is None else 'unknown which policy is live'} ({error})"
    app.readiness.see(wanted.version)
    if wanted.version == served and app.readiness.withdrawn is None:
        return ""
    try:
        serve = app.open if served is None else app.swap
        await serve(await asyncio.to_thread(wanted.directory), wanted.version)
    except TriplaneError as error:
        why = f"policy {wanted.version[:12]} is live and can't be loaded: {error}"
        if served is None:
            return f"waiting for the first policy: {why}"
        app.readiness.withdrawn = why
        return f"withdrawn, still on policy {served[:12]}: {why}"
    if served is not None:
        print(f"policy {wanted.version} in place of {served}", flush=True)
    return ""
