"""The live sandboxes of a server: each has an id nobody can guess, one connection, and a lifetime."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contracts.owned import owned_name, sweep_abandoned
from envd.errors import BackendUnavailable, SandboxGone, ServerBusy
from envd.sandbox.cgroups import OWNED, remove_groups
from envd.sandbox.linux import sandbox_owner
from envd.server.templates import Templates
from envd.server.zygotes import Link, Zygote
from envd.types import Limits, ServerInfo

VERSION = "1"
_ASK_S = 60.0
"""How long an agent may take beyond its tools' own deadlines before the sandbox counts as hung."""
_log = logging.getLogger("envd")


@dataclass
class _Live:
    link: Link
    expiry: asyncio.TimerHandle


class Sandboxes:
    """Creates, finds and destroys sandboxes, and runs verifications beside them."""

    def __init__(self, backend: str, run_dir: Path, agents: Zygote, verifiers: Zygote) -> None:
        self.backend = backend
        self.templates = Templates(run_dir / "templates", sandbox_owner())
        self._run_dir = run_dir
        self._agents, self._verifiers = agents, verifiers
        self._live: dict[str, _Live] = {}
        self._verifying = asyncio.Semaphore(os.cpu_count() or 1)

    @classmethod
    async def start(cls, backend: str, state_dir: Path | None = None) -> Sandboxes:
        """Start on a backend; `auto` takes namespaces where one really starts, else plain, and says so.

        Files are kept in `state_dir`, else in a fresh temporary directory, which is removed at the end either way.
        """
        if backend != "auto":
            return await cls._start_on(backend, state_dir)
        try:
            return await cls._start_on("namespaces", state_dir)
        except BackendUnavailable as error:
            _log.error("namespaces do not work here (%s): falling back to the plain backend", error)
            return await cls._start_on("plain", state_dir)

    @classmethod
    async def _start_on(cls, backend: str, state_dir: Path | None) -> Sandboxes:
        sweep_abandoned(Path(tempfile.gettempdir()), OWNED)
        run_dir = state_dir or Path(tempfile.gettempdir(), f"{OWNED}{owned_name()}")
        run_dir.mkdir(parents=True, exist_ok=True)
        run_dir.chmod(0o711)
        for name in ("templates", "boxes"):
            (run_dir / name).mkdir()
        started: list[Zygote] = []
        try:
            for role in ("agent", "verifier"):
                started.append(await Zygote.start(run_dir, f"{run_dir.name}-{role}", backend, role))
            sandboxes = cls(backend, run_dir, *started)
            await sandboxes._probe()
        except BaseException:
            for zygote in started:
                await zygote.stop()
            shutil.rmtree(run_dir, ignore_errors=True)
            raise
        if backend == "plain":
            _log.error("PLAIN BACKEND: sandboxes are ordinary processes and isolate nothing; run trusted code only")
        return sandboxes

    async def _probe(self) -> None:
        """Really start a sandbox, so that a machine that can't is found out now."""
        template = await self.templates.put({"probe": b"probe\n"})
        identity = await self.create(template, Limits(), {})
        try:
            call = {"name": "exec", "arguments": {"command": "cat probe"}}
            result = (await self.batch(identity, [call], 10))[0]
        except SandboxGone as error:
            raise BackendUnavailable(f"a {self.backend} sandbox died in its first command") from error
        if result["text"] != "probe\nexit 0":
            raise BackendUnavailable(f"a {self.backend} sandbox can't run commands: {result['text']}")
        await self.destroy(identity)

    def info(self) -> ServerInfo:
        """What this server is."""
        enforced = (*self._agents.enforced, "disk") if self.backend == "namespaces" else self._agents.enforced
        isolation = self.backend == "namespaces"
        return ServerInfo(self.backend, isolation, VERSION, len(self._live), tuple(sorted(enforced)))

    async def create(self, template: str, limits: Limits, env: Mapping[str, str]) -> str:
        """Start a sandbox and return its id."""
        link = await self._agents.spawn(self.templates.require(template), limits, dict(env))
        identity = secrets.token_urlsafe(16)
        expiry = asyncio.get_running_loop().call_later(limits.lifetime_s, self._expire, identity)
        self._live[identity] = _Live(link, expiry)
        _log.debug("created sandbox %s", identity)
        return identity

    async def batch(self, identity: str, calls: Sequence[dict[str, Any]], timeout_s: float) -> list[dict[str, Any]]:
        """Run tool calls and return their results as the agent sent them."""
        link = self._find(identity).link
        request = {"op": "batch", "calls": list(calls), "timeout_s": timeout_s}
        reply, _ = await self._ask(identity, link, request, timeout_s * max(1, len(calls)) + _ASK_S)
        return list(reply["results"])

    async def diff(self, identity: str) -> bytes:
        """The sandbox's workspace against its template."""
        _, diff = await self._ask(identity, self._find(identity).link, {"op": "diff"}, _ASK_S)
        return diff

    async def destroy(self, identity: str) -> None:
        """End a sandbox; unknown ids are fine."""
        live = self._live.pop(identity, None)
        if live is None:
            return
        live.expiry.cancel()
        live.link.close()
        await live.link.closed()

    async def verify(
        self,
        template: str,
        diff: bytes,
        hidden: Mapping[str, bytes],
        tests: Sequence[str],
        limits: Limits,
        timeout_s: float,
        patience_s: float | None = None,
    ) -> dict[str, Any]:
        """Grade a final state in a sandbox of its own; at most one a core at a time.

        Raises ServerBusy when none of these slots came free within `patience_s` (None: waits without end).
        """
        digest = self.templates.require(template)
        files = sorted(hidden.items())
        header = {
            "op": "verify",
            "diff_bytes": len(diff),
            "hidden": [[path, len(content)] for path, content in files],
            "tests": list(tests),
            "timeout_s": timeout_s,
        }
        blob = diff + b"".join(content for _, content in files)
        try:
            async with asyncio.timeout(patience_s):
                await self._verifying.acquire()
        except TimeoutError as error:
            raise ServerBusy(f"no verification slot came free in {patience_s:g} s: ask again") from error
        try:
            link = await self._verifiers.spawn(digest, limits, {})
            try:
                reply, _ = await link.ask(header, blob, timeout_s=timeout_s + _ASK_S)
            finally:
                link.close()
        finally:
            self._verifying.release()
        return dict(reply["result"])

    async def stop(self) -> None:
        """Destroy everything and leave nothing behind."""
        for identity in list(self._live):
            await self.destroy(identity)
        await asyncio.gather(self._agents.stop(), self._verifiers.stop(), self.templates.settled())
        await asyncio.to_thread(shutil.rmtree, self._run_dir, True)
        await asyncio.to_thread(remove_groups, self._run_dir.name)

    async def zygote_died(self) -> None:
        """Return when a zygote has ended by itself; the server can't go on without it."""
        while self._agents.process.poll() is None and self._verifiers.process.poll() is None:
            await asyncio.sleep(0.5)

    async def _ask(
        self, identity: str, link: Link, request: dict[str, Any], timeout_s: float
    ) -> tuple[dict[str, Any], bytes]:
        try:
            return await link.ask(request, timeout_s=timeout_s)
        except (SandboxGone, asyncio.CancelledError):
            await self.destroy(identity)
            raise

    def _find(self, identity: str) -> _Live:
        if identity not in self._live:
            raise SandboxGone(f"no sandbox {identity[:40]!r}: it was finished, crashed, or outlived its lifetime")
        return self._live[identity]

    def _expire(self, identity: str) -> None:
        live = self._live.pop(identity, None)
        if live is not None:
            _log.warning("sandbox %s outlived its lifetime and was destroyed", identity)
            live.link.close()
