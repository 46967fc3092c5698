"""The audit log: what was denied, limited or tampered with, as numbered events; docs/policies.md lists the kinds.

    record() -> memory (the newest `KEEP`), followers, and one line of JSON in FILE

A line reaches the kernel before record() returns, so a killed server loses none and leaves at most a torn last line; a thread has the
disk keep them, a batch at a time. Events come at the pace of hostile code, so repeats are counted instead of kept beyond `BURST` in `WINDOW_S`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from envd.server.audit_file import AuditFile

Kind = Literal[
    "server.started", "policy.denied", "tool.denied", "auth.denied", "request.refused", "path.escape", "limit.memory", "limit.pids",
    "limit.disk", "limit.time", "limit.output", "lifetime.expired", "guest.malformed", "shell.died", "sandbox.died", "isolation.none",
    "syscall.refused", "verify.tampered", "audit.suppressed", "audit.lost",
]  # fmt: skip
KINDS: tuple[str, ...] = get_args(Kind)
KEEP = 16_384
"""Events kept in memory."""
BURST, WINDOW_S = 32, 10.0
"""Events of one kind and sandbox that are kept within so many seconds; what comes beyond is counted in one audit.suppressed."""
_MAX_SOURCES = 8192
_MAX_TEXT, _MAX_DETAIL = 512, 4096
_log = logging.getLogger("envd.audit")


@dataclass(frozen=True)
class Event:
    """One thing that happened."""

    number: int
    """Rises by one with each event, also over restarts of a server that writes to a file."""
    unix_time: float
    sandbox_id: str
    """Empty: of the server itself."""
    kind: str
    detail_json: str
    """An object; what came from a sandbox is cut in it."""

    def line(self) -> bytes:
        """The event as a line of the file."""
        head = {"number": self.number, "time": self.unix_time, "sandbox": self.sandbox_id, "kind": self.kind}
        return (json.dumps(head)[:-1] + f', "detail": {self.detail_json}}}\n').encode()


@dataclass
class _Source:
    since: float
    seen: int = 0
    suppressed: int = 0


class AuditLog:
    """Records events and lets readers follow them. `record` may be called from any thread and never waits for a reader."""

    def __init__(self, path: Path | None = None, *, max_bytes: int = 64 * 1024 * 1024, files: int = 4) -> None:
        """path: where events are appended, else memory only. A file of max_bytes is moved to PATH.1 and so on, `files` of them
        are kept. Raises EnvdError when it can't be written or belongs to another server."""
        self._file = None if path is None else AuditFile(path, max_bytes=max_bytes, files=files)
        self._number = 0 if self._file is None else self._file.last_number
        self._ring: list[Event | None] = [None] * KEEP
        self._oldest = self._number + 1
        self._sources: dict[tuple[str, str], _Source] = {}
        self.counts: Counter[str] = Counter()
        """Events by kind, also those that were only counted."""
        self._lock = threading.Lock()
        self._followers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    @property
    def last(self) -> int:
        """Number of the newest event."""
        return self._number

    def record(self, kind: Kind, sandbox_id: str = "", **detail: Any) -> Event | None:
        """Record an event and return it; None when it was one of too many of its kind and sandbox, and only counted."""
        with self._lock:
            self.counts[kind] += 1
            if not self._admit(kind, sandbox_id):
                return None
            event = self._append(kind, sandbox_id, detail)
        self._wake()
        _log.info("%s %s %s", event.kind, event.sandbox_id or "server", event.detail_json)
        return event

    def forget(self, sandbox_id: str) -> None:
        """The sandbox has ended: record what was only counted of it."""
        with self._lock:
            for key in [key for key in self._sources if key[1] == sandbox_id]:
                self._settle(key, self._sources.pop(key))
        self._wake()

    def since(self, after: int = 0, sandbox_id: str = "") -> list[Event]:
        """The events in memory with numbers above `after`, of one sandbox or (empty) of all."""
        with self._lock:
            numbers = range(max(after + 1, self._oldest), self._number + 1)
            found = [self._ring[number % KEEP] for number in numbers]
        return [event for event in found if event is not None and sandbox_id in ("", event.sandbox_id)]

    async def follow(self, after: int = 0, sandbox_id: str = "") -> AsyncIterator[Event]:
        """Events with numbers above `after`, and then each as it is recorded, without end.

        A reader slower than `KEEP` events misses the oldest, and sees that from the numbers.
        """
        news = asyncio.Event()
        self._followers[news] = asyncio.get_running_loop()
        try:
            while True:
                news.clear()
                upto = self._number
                for event in self.since(after, sandbox_id):
                    yield event
                    after = event.number
                after = max(after, upto)
                await news.wait()
        finally:
            del self._followers[news]

    def close(self) -> None:
        """Record what was only counted, have the disk keep everything and let go of the file."""
        with self._lock:
            for key, source in self._sources.items():
                self._settle(key, source)
            self._sources.clear()
            if self._file is not None:
                self._file.close()

    def _admit(self, kind: str, sandbox_id: str) -> bool:
        key, now = (kind, sandbox_id), time.monotonic()
        source = self._sources.get(key)
        if source is None or now - source.since >= WINDOW_S:
            if source is not None:
                self._settle(key, self._sources.pop(key))
            if len(self._sources) >= _MAX_SOURCES:
                oldest = next(iter(self._sources))
                self._settle(oldest, self._sources.pop(oldest))
            source = self._sources[key] = _Source(now)
        source.seen += 1
        if source.seen <= BURST:
            return True
        source.suppressed += 1
        return False

    def _settle(self, key: tuple[str, str], source: _Source) -> None:
        if source.suppressed:
            self._append("audit.suppressed", key[1], {"kind": key[0], "count": source.suppressed})

    def _append(self, kind: str, sandbox_id: str, detail: dict[str, Any]) -> Event:
        self._number += 1
        event = Event(self._number, round(time.time(), 6), sandbox_id[:64], kind, _detail(detail))
        self._ring[self._number % KEEP] = event
        self._oldest = max(self._oldest, self._number - KEEP + 1)
        if self._file is not None and self._file.write(event.line()) and (lost := self._file.take_lost()):
            self._append("audit.lost", "", {"count": lost, "reason": "the file could not be written"})
        return event

    def _wake(self) -> None:
        for news, loop in list(self._followers.items()):
            try:
                loop.call_soon_threadsafe(news.set)
            except RuntimeError:
                continue  # its loop has ended


def leaves_root(path: str, link_target: str | None = None) -> bool:
    """Whether a path, or a link at that path, names a place above the workspace. Sandboxes' links are resolved inside it all the same."""
    if link_target is not None:
        if link_target.startswith("/"):
            return not (link_target + "/").startswith("/workspace/")
        path = path.rpartition("/")[0] + "/" + link_target
    depth = 0
    for part in path.removeprefix("/workspace").split("/"):
        depth += -1 if part == ".." else part not in ("", ".")
        if depth < 0:
            return True
    return False


def _detail(detail: dict[str, Any]) -> str:
    """An object in ASCII, each text cut to 512 characters and the whole to 4 KiB."""
    text = json.dumps({key: _short(value) for key, value in detail.items()}, sort_keys=True)
    return text if len(text) <= _MAX_DETAIL else json.dumps({"cut": text[: _MAX_DETAIL // 2]})


def _short(value: Any) -> Any:
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_short(each) for each in list(value)[:32]]
    if isinstance(value, bool | int | float | None):
        return value
    return str(value)[:_MAX_TEXT]
