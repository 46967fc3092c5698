"""A `SandboxClient` over several servers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from envd.addresses import entries_of, servers_of
from envd.client import Sandbox, SandboxClient
from envd.connection import Access, Metadata
from envd.errors import EnvdError, ServerDraining, ServerLost, ServerUnavailable, TemplateError
from envd.fleet.member import Member
from envd.fleet.moving import MovableSandbox
from envd.types import Handle, VerifyResult

T = TypeVar("T")
REFRESH_S = 10.0
"""Seconds between two resolutions of names, at least: servers come and go."""
VERIFY_TRIES = 2
"""Servers that one verification is sent to, one after the other, while each is lost."""
WAIT_S = 30.0
"""Longest wait for a server while none can be used: what is killed is usually started again in seconds."""
LOOK_S = 2.0
"""Seconds between two looks at the servers that have sandboxes of ours: whether they drain."""
_AGAIN_S = 0.5
_MOVES_AT_ONCE = 4
_log = logging.getLogger(__name__)


class FleetClient(SandboxClient):
    """A `SandboxClient` over a list of servers.

    Each sandbox starts on the server with the fewest sandboxes of this client, ties in random order, and stays there.
    Templates are uploaded to a server when it first needs them. A server that can't be reached, or drains, is left out
    for 1 to 30 s and then asked again; what a lost server had raises ServerLost. Sandboxes of a server that drains are
    moved to another one if their backend keeps processes. Give all servers the same backends and rules: which one plays
    an episode must not matter.
    """

    def __init__(self, address: str, backend: str = "") -> None:
        """address: as `envd.addresses` describes. backend: see SandboxClient. Raises EnvdError for an entry that is not
        an address.
        """
        super().__init__(address, Access(), backend)
        self._entries = entries_of(address)
        self._members: dict[str, Member] = {}
        self._files: dict[str, tuple[Mapping[str, bytes], Mapping[str, bytes] | None]] = {}
        self._archives: dict[str, Path] = {}
        self._faults: list[str] = []
        self._refreshing = asyncio.Lock()
        self._refreshed = -REFRESH_S
        self._looking: asyncio.Task[None] | None = None
        self._moving: dict[Member, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        await self._refresh()
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [*([self._looking] if self._looking else []), *self._moving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        members = list(self._members.values())
        self._members.clear()
        await asyncio.gather(*(each.__aexit__(kind, error, trace) for each in members))

    @property
    def loads(self) -> dict[str, int]:
        """Sandboxes of this client on each server, with creations and verifications in progress."""
        return {address: member.load for address, member in self._members.items()}

    async def put_template(self, files: Mapping[str, bytes], base: Mapping[str, bytes] | None = None) -> str:
        """See SandboxClient.put_template. Other servers get the files when they need them."""

        async def put(member: Member) -> str:
            digest = await member.put_template(files, base)
            member.templates.add(digest)
            return digest

        digest = await self._somewhere(put)
        self._files[digest] = files, base
        return digest

    async def put_runtime(self, digest: str, archive: Path) -> None:
        """See SandboxClient.put_runtime. Servers get it when they need it; the file must stay."""
        self._archives[digest] = archive

    async def create(self, template: str, **options: Any) -> Sandbox:
        """See SandboxClient.create. With an idempotency_key, a retry goes to the same server while that one answers."""

        def create(member: Member) -> Awaitable[Sandbox]:
            return member.create(template, **options)

        return await self._somewhere(
            lambda member: self._with_files(member, template, options.get("runtime", ""), create),
            options.get("idempotency_key"),
        )

    def attach(self, handle: Handle) -> Sandbox:
        """See SandboxClient.attach: only to a sandbox that this client created."""
        for member in self._members.values():
            if member.has(handle.id):
                return member.attach(handle)
        raise EnvdError(f"sandbox {handle.id[:40]} is not of this client: attach with a client of its own server")

    async def adopt(self, handle: Handle, server: str) -> Sandbox:
        """See SandboxClient.adopt: on one of the listed servers."""
        await self._refresh()
        member = self._members.get(server)
        if member is None:
            raise EnvdError(f"sandbox {handle.id[:40]} is on the envd server {server}, which {self.address} lacks")
        return member.adopted(handle)

    async def verify(
        self, template: str, diff: bytes, hidden_files: Mapping[str, bytes], tests: Sequence[str], **options: Any
    ) -> VerifyResult:
        """See SandboxClient.verify. One whose server is lost runs again on another, at most `VERIFY_TRIES` in all."""

        def verify(member: Member) -> Awaitable[VerifyResult]:
            return member.verify(template, diff, hidden_files, tests, **options)

        return await self._somewhere(
            lambda member: self._with_files(member, template, options.get("runtime", ""), verify), tries=VERIFY_TRIES
        )

    async def found(self, template: str, findings: Sequence[str]) -> None:
        """See SandboxClient.found: in the audit log of one of the servers."""
        await self._somewhere(lambda member: member.found(template, findings))

    async def ask(
        self,
        method: str,
        request: Any,
        timeout_s: float | None = None,
        key: str | None = None,
        metadata: Metadata = (),
    ) -> Any:
        """Refuse: a call without a sandbox has no server here."""
        raise EnvdError(f"{method} needs a client of one server, this one is of {self.address}")

    async def _with_files(
        self, member: Member, template: str, runtime: str, work: Callable[[Member], Awaitable[T]]
    ) -> T:
        files, archive = self._files.get(template), self._archives.get(runtime)
        await member.provide(template, files, runtime, archive)
        try:
            return await work(member)
        except TemplateError:  # it was restarted, or has removed what was not used for long
            member.templates -= {template, runtime}
            if files is None and archive is None:
                raise
        await member.provide(template, files, runtime, archive)
        return await work(member)

    async def _somewhere(self, work: Callable[[Member], Awaitable[T]], key: str | None = None, tries: int = 0) -> T:
        """Do work on the best server, and on the next one if that is lost or drains.

        tries: at most; 0: as many as there are servers.
        """
        tried: list[Member] = []
        failures = 0
        while True:
            async with self._chosen(tried, key) as member:
                try:
                    return await work(member)
                except (ServerLost, ServerDraining):
                    failures += 1
                    if failures >= (tries or max(VERIFY_TRIES, len(self._members))):
                        raise

    @asynccontextmanager
    async def _chosen(self, tried: list[Member], key: str | None) -> AsyncIterator[Member]:
        """A server that answers and was not tried yet, else any that answers within `WAIT_S`.

        Raises ServerUnavailable if there is none.
        """
        if not self._members and self._refreshed < 0:
            raise EnvdError("SandboxClient is not open: use it as `async with open_client(address) as client`")
        deadline = time.monotonic() + WAIT_S
        while True:
            await self._refresh()
            member = self._best(tried, key)
            if member is None:
                if time.monotonic() > deadline:
                    raise ServerUnavailable(self._all_lost())
                await asyncio.sleep(_AGAIN_S)
                tried.clear()
                continue
            tried.append(member)
            with member.working():  # counted at once, so that those who choose meanwhile see it
                if await member.serves():
                    yield member
                    return

    def _best(self, tried: Sequence[Member], key: str | None) -> Member | None:
        left = [each for each in self._members.values() if each.listed and each not in tried]
        if key is not None:
            rank = {each.address: hashlib.sha256(f"{key} {each.address}".encode()).digest() for each in left}
            return min(left, key=lambda each: (each.is_out, rank[each.address]), default=None)
        random.shuffle(left)
        # those that are left out come last: when nobody else is left they are asked before giving up
        return min(left, key=lambda each: (each.is_out, each.load), default=None)

    async def _refresh(self) -> None:
        """Bring the members in line with the list, unless that was done a moment ago."""
        async with self._refreshing:
            if time.monotonic() - self._refreshed < REFRESH_S and not self._lost_one():
                return
            addresses, self._faults = await servers_of(self._entries)
            self._refreshed = time.monotonic()
            for address in sorted(addresses - self._members.keys()):
                member = Member(address, self._move_away, self.backend)
                self._members[address] = await member.__aenter__()
            for address, member in list(self._members.items()):
                # a failing name service takes no server away
                member.listed = address in addresses or bool(self._faults)
                if not member.listed and not member.load:
                    del self._members[address]
                    await member.__aexit__(None, None, None)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            busy = [each for each in self._members.values() if each.load]
            await asyncio.gather(*(each.look() for each in busy), return_exceptions=True)

    def _move_away(self, member: Member) -> None:
        if self._moving.get(member) is None or self._moving[member].done():
            self._moving[member] = asyncio.create_task(self._moved(member))

    async def _moved(self, member: Member) -> None:
        """Move what can be moved away from a server that drains."""
        slots = asyncio.Semaphore(_MOVES_AT_ONCE)

        async def move(sandbox: MovableSandbox) -> None:
            async with slots, self._chosen([member], None) as target:
                await sandbox.move(target, target.caller.key)
                member.handed_over(sandbox, target)

        try:
            sandboxes = await member.movable()
        except EnvdError as error:
            _log.warning("sandboxes of %s can't be moved: %s", member.address, error)
            return
        results = await asyncio.gather(*map(move, sandboxes), return_exceptions=True)
        faults = [str(each) for each in results if isinstance(each, BaseException)]
        if sandboxes:
            moved = len(sandboxes) - len(faults)
            _log.warning("%d of %d sandboxes moved from %s %s", moved, len(sandboxes), member.address, faults[:1] or "")

    def _lost_one(self) -> bool:
        recent = time.monotonic() - self._refreshed > 1.0
        return recent and any(each.is_out for each in self._members.values())

    def _all_lost(self) -> str:
        listed = [each for each in self._members.values() if each.listed]
        reasons = [f"{each.address}: {each.fault or 'it failed just now'}" for each in listed]
        reasons += self._faults
        return (
            f"none of the {len(listed)} envd servers of {self.address} can be used ({'; '.join(reasons)}), for"
            f" {WAIT_S:g} s: check that `python -m envd serve` runs there"
        )
