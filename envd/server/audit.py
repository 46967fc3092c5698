"""Audit log: denials, limits hit and tampering as numbered events; docs/sandboxes-rules.md lists the kinds.

    record() -> memory (the newest `KEEP`), followers, and one line of JSON in FILE
                the trail of calls, if enabled, is separate: the newest `KEEP_CALLS` in memory, and FILE.calls

A line reaches the kernel before record() returns, so a killed server loses no line and leaves at most a torn last one.
A thread syncs the lines to disk in batches. Hostile code can cause events at any rate, so events beyond `BURST` in
`WINDOW_S` are counted and not kept. The trail of calls keeps every call. It has its own memory and files, so that no
number of calls evicts a denial.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, get_args

from contracts.rpc import caller
from envd.errors import EnvdError
from envd.server.audit_file import AuditFile, last_number_of

Kind = Literal[
    "server.started",
    "policy.denied",
    "quota.refused",
    "tool.denied",
    "auth.denied",
    "request.refused",
    "path.escape",
    "limit.memory",
    "limit.pids",
    "limit.sockets",
    "limit.disk",
    "limit.time",
    "limit.output",
    "lifetime.expired",
    "guest.malformed",
    "shell.died",
    "sandbox.died",
    "isolation.none",
    "syscall.refused",
    "export.refused",
    "verify.tampered",
    "client.stalled",
    "call.abandoned",
    "call.begun",
    "call.made",
    "audit.suppressed",
    "audit.lost",
    "network.denied",
    "network.connected",
]
KINDS: tuple[str, ...] = get_args(Kind)
TRAIL: frozenset[str] = frozenset({"call.begun", "call.made", "network.connected"})
"""Kinds that go to the trail of calls."""
_BY_CLIENTS = TRAIL - {"network.connected"}
"""Kinds of the trail that code in a sandbox can't cause: every event is kept."""
KEEP, KEEP_CALLS = 16_384, 8_192
"""Number of events kept in memory: without the trail of calls, and of that trail."""
BURST, WINDOW_S = 32, 10.0
"""At most BURST events of one kind and sandbox are kept in WINDOW_S seconds; one audit.suppressed counts the rest.
Events of no sandbox are counted by the source of their call (`contracts.rpc.caller.source`).
"""
FILES = 4
"""Files kept of the log, and of the trail: the one that is written, and PATH.1 to PATH.3."""
SIGNED = b', "hmac": "%s"'
"""What a signature adds to a line."""
_MAX_SOURCES = 8192
_MAX_TEXT, _MAX_DETAIL = 512, 4096
_ENCODER = json.JSONEncoder(sort_keys=True)
_log = logging.getLogger("envd.audit")


@dataclass(frozen=True)
class Event:
    """One event of the audit log."""

    number: int
    """Increases by one with each event, also across restarts of a server that writes to a file."""
    unix_time: float
    sandbox_id: str
    """Empty for an event of the server itself."""
    kind: str
    detail_json: str
    """A JSON object; texts in it are cut to a maximum length."""

    def line(self, key: bytes | None = None) -> bytes:
        """Event as a line of JSON for the file. key: signs it."""
        sandbox = json.dumps(self.sandbox_id)
        head = f'"number": {self.number}, "time": {self.unix_time!r}, "sandbox": {sandbox}, "kind": "{self.kind}"'
        signed = f'{{{head}, "detail": {self.detail_json}'.encode()
        return signed + (SIGNED % signature(key, signed) if key else b"") + b"}\n"


def signature(key: bytes, signed: bytes) -> bytes:
    """HMAC-SHA256, in hexadecimal, of a line up to the signature."""
    return hmac.new(key, signed, "sha256").hexdigest().encode()


@dataclass
class _Source:
    since: float
    seen: int = 0
    suppressed: int = 0


class AuditLog:
    """Records events and lets readers follow them.

    `record` may be called from any thread and never waits for a reader.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        calls: bool = False,
        key: bytes | None = None,
        max_bytes: int = 64 * 1024 * 1024,
        files: int = FILES,
    ) -> None:
        """path: file to append to; None: memory only. calls: also keep a trail of calls, in `PATH.calls`. key: signs
        the lines of the files.

        A file that reaches max_bytes is moved to PATH.1 and so on; `files` files are kept. Raises EnvdError if a file
        can't be written or belongs to another server.
        """
        self.calls = calls
        """Whether the trail of calls is enabled."""
        self._number, self._files, self._key = 0, tuple[AuditFile, ...](), key
        if path is not None:
            if not path.name:
                raise EnvdError("the audit log can't be written: its path names no file")
            trail = path.with_name(path.name + ".calls")
            with contextlib.ExitStack() as opened:
                for each in (path, trail) if calls else (path,):
                    self._files += (AuditFile(each, max_bytes=max_bytes, files=files),)
                    opened.callback(self._files[-1].close)
                self._number = max(last_number_of(each, files) for each in (path, trail))
                opened.pop_all()
        self._events: deque[Event] = deque(maxlen=KEEP)
        self._trail: deque[Event] = deque(maxlen=KEEP_CALLS)
        self._sources: dict[tuple[str, str, str], _Source] = {}
        self.counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        """Number of events by kind, including suppressed ones, and under audit.lost the lines that no file took. All
        kinds are there from the start: an alert sees the first event of a counter only if it was 0 before.
        """
        self._lock = threading.Lock()
        self._followers: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def record(self, kind: Kind, sandbox_id: str = "", **detail: Any) -> Event | None:
        """Record an event and return it; None if the burst limit of its kind and sandbox suppressed it."""
        source, address = ("", "") if sandbox_id else caller.source()
        with self._lock:
            self.counts[kind] += 1
            if not self._admit((kind, sandbox_id, source)):
                return None
            event = self._append(kind, sandbox_id, detail | ({"peer": address} if address else {}))
        self._wake()
        level = logging.DEBUG if kind in TRAIL else logging.INFO
        _log.log(level, "%s %s %s", event.kind, event.sandbox_id or "server", event.detail_json)
        return event

    def forget(self, sandbox_id: str) -> None:
        """Record the suppressed events of a sandbox that has ended, and forget its counts."""
        with self._lock:
            for key in [key for key in self._sources if key[1] == sandbox_id]:
                self._settle(key, self._sources.pop(key))
        self._wake()

    def since(self, after: int = 0, sandbox_id: str = "") -> list[Event]:
        """Events in memory with numbers above `after`, of one sandbox or, if `sandbox_id` is empty, of all."""
        with self._lock:
            found = [*_above(after, self._events), *_above(after, self._trail)]
        found.sort(key=lambda event: event.number)
        return [event for event in found if sandbox_id in ("", event.sandbox_id)]

    async def follow(self, after: int = 0, sandbox_id: str = "") -> AsyncIterator[Event]:
        """Yield the events with numbers above `after`, then each new event, without end.

        A reader that lags more than `KEEP` events behind misses the oldest ones; the gap in the numbers shows it.
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
        """Record the suppressed events, sync the files to disk and close them."""
        with self._lock:
            for key, source in self._sources.items():
                self._settle(key, source)
            self._sources.clear()
            for file in self._files:
                file.close()

    def _admit(self, key: tuple[str, str, str]) -> bool:
        if key[0] in _BY_CLIENTS:
            return True
        now = time.monotonic()
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

    def _settle(self, key: tuple[str, str, str], source: _Source) -> None:
        kind, sandbox_id, where = key
        if source.suppressed:
            told = {"source": where} if where else {}
            self.counts["audit.suppressed"] += 1
            self._append("audit.suppressed", sandbox_id, {"kind": kind, "count": source.suppressed, **told})

    def _append(self, kind: str, sandbox_id: str, detail: dict[str, Any]) -> Event:
        self._number += 1
        event = Event(self._number, round(time.time(), 6), sandbox_id[:64], kind, _detail(detail))
        (self._trail if kind in TRAIL else self._events).append(event)
        if self._files:
            file = self._files[-1 if kind in TRAIL else 0]
            if not file.write(event.line(self._key)):
                self.counts["audit.lost"] += 1
            elif lost := file.take_lost():
                self._append("audit.lost", "", {"count": lost, "reason": f"{file.name} could not be written"})
        return event

    def _wake(self) -> None:
        for news, loop in list(self._followers.items()):
            try:
                loop.call_soon_threadsafe(news.set)
            except RuntimeError:
                continue  # its loop has ended


def _above(number: int, events: deque[Event]) -> Iterable[Event]:
    return takewhile(lambda event: event.number > number, reversed(events))


def leaves_root(path: str, link_target: str | None = None) -> bool:
    """Whether a path, or a link at that path, points above the workspace.

    The agent resolves such links inside the workspace regardless.
    """
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
    """Detail as a JSON object in ASCII, each text cut to 512 characters and the whole to 4 KiB."""
    text = _ENCODER.encode({key: _short(value) for key, value in detail.items()})
    return text if len(text) <= _MAX_DETAIL else json.dumps({"cut": text[: _MAX_DETAIL // 2]})


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_short(each) for each in list(value)[:32]]
    if isinstance(value, bool | int | float | None):
        return value
    return str(value)[:_MAX_TEXT]
