"""Record the limits that sandboxes hit: check usage after a sign of a limit, at a sandbox's end, and periodically, for
sandboxes that show no sign.

exec failed, a process was killed, no space left --soon--> usage of its box --more than was noted--> audit event
every sandbox, a few a second                       ------^
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable

from envd.backends.base import Box, Usage
from envd.errors import EnvdError, SandboxGone
from envd.server.audit import AuditLog, Kind
from envd.server.live import Live

_SETTLE_S = 0.05
"""Delay, in seconds, from a sign to the check, since signs come in groups."""
_ROUND_S, _BETWEEN_S = 5.0, 0.02
"""Pauses, in seconds, between rounds and between checks. A check takes up to 1 ms: a round of 2,000 sandboxes, 40 s."""
_KINDS: dict[str, Kind] = {"memory": "limit.memory", "pids": "limit.pids", "sockets": "limit.sockets"}
_HIT = re.compile(r"(memory|pids|sockets) (\d+) times")


class LimitsWatch:
    """Records each new hit of a sandbox's limits as an audit event."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit
        self._signs: set[Live] = set()

    def sign(self, live: Live) -> bool:
        """Note an event that a limit may have caused; return whether the caller must start `look_soon`."""
        if live in self._signs:
            return False
        self._signs.add(live)
        return True

    async def look_soon(self, live: Live) -> None:
        """Check a sandbox _SETTLE_S seconds after a sign."""
        await asyncio.sleep(_SETTLE_S)
        self._signs.discard(live)
        if live.box is not None:
            await self.look(live, live.box)

    async def look_last(self, live: Live, box: Box) -> None:
        """Check a sandbox before its box is destroyed, if a sign was not checked yet or the sandbox ended by itself."""
        if live in self._signs or box.guest.gone is not None:
            self._signs.discard(live)
            await self.look(live, box)

    async def look(self, live: Live, box: Box) -> None:
        """Check a sandbox's usage and record limits that were hit since the last check."""
        try:
            usage = await box.usage()
        except SandboxGone as error:
            usage = Usage(events={name: int(count) for name, count in _HIT.findall(str(error))})
        except (EnvdError, OSError):
            return  # a state change is in progress
        for name, count in usage.events.items():
            if name in _KINDS and count > live.noted.get(name, 0):
                live.noted[name] = count
                self._audit.record(_KINDS[name], live.identity, count=count)
        if usage.disk_full and not live.noted.get("disk"):
            self._audit.record("limit.disk", live.identity, bytes=usage.disk_bytes)
        live.noted["disk"] = int(usage.disk_full)

    async def rounds(self, living: Callable[[], Iterable[Live]]) -> None:
        """Check all sandboxes in rounds, without end."""
        while True:
            for live in list(living()):
                if live.box is not None and not live.ended:
                    await self.look(live, live.box)
                    await asyncio.sleep(_BETWEEN_S)
            await asyncio.sleep(_ROUND_S)
