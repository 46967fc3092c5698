"""Whether sandboxes hit their limits: looked at after what may be a sign of it, at the end, and now and then for those
that hide it.

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
"""From a sign to a look: signs come together."""
_ROUND_S, _BETWEEN_S = 5.0, 0.02
"""A look costs up to a millisecond: 2,000 sandboxes are looked at in 40 s."""
_KINDS: dict[str, Kind] = {"memory": "limit.memory", "pids": "limit.pids", "sockets": "limit.sockets"}
_HIT = re.compile(r"(memory|pids|sockets) (\d+) times")


class LimitsWatch:
    """Records each limit that a sandbox hits, once for each time that it did."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit
        self._signs: set[Live] = set()

    def sign(self, live: Live) -> bool:
        """Something that may come from a limit happened; whether a look is to be begun now."""
        if live in self._signs:
            return False
        self._signs.add(live)
        return True

    async def look_soon(self, live: Live) -> None:
        """Look, once what came with the sign is over."""
        await asyncio.sleep(_SETTLE_S)
        self._signs.discard(live)
        if live.box is not None:
            await self.look(live, live.box)

    async def look_last(self, live: Live, box: Box) -> None:
        """Before its box is destroyed: where there were signs that were not looked at, or it ended by itself."""
        if live in self._signs or box.guest.gone is not None:
            self._signs.discard(live)
            await self.look(live, box)

    async def look(self, live: Live, box: Box) -> None:
        """Record what was not recorded yet."""
        try:
            usage = await box.usage()
        except SandboxGone as error:
            usage = Usage(events={name: int(count) for name, count in _HIT.findall(str(error))})
        except (EnvdError, OSError):
            return  # it is just being changed
        for name, count in usage.events.items():
            if name in _KINDS and count > live.noted.get(name, 0):
                live.noted[name] = count
                self._audit.record(_KINDS[name], live.identity, count=count)
        if usage.disk_full and not live.noted.get("disk"):
            self._audit.record("limit.disk", live.identity, bytes=usage.disk_bytes)
        live.noted["disk"] = int(usage.disk_full)

    async def rounds(self, living: Callable[[], Iterable[Live]]) -> None:
        """Look at all, again and again, without end."""
        while True:
            for live in list(living()):
                if live.box is not None and not live.ended:
                    await self.look(live, live.box)
                    await asyncio.sleep(_BETWEEN_S)
            await asyncio.sleep(_ROUND_S)
