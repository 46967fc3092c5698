"""Where attacks happen: a server with one backend, a neighbour sandbox that must stay unharmed, and a host that is
looked at before and after.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from envd.client import EnvdError, Limits, SandboxGone, ToolCall
from envd.errors import ServerUnavailable
from envd.local import LocalEnvd
from envd.operations.client import ManagedSandbox, OperationsClient
from envd.server.audit import TRAIL
from tests.envd.harness import FILES, HIDDEN, TESTS
from tests.escape.attack import SMALL, Attack
from tests.escape.host import Host
from tests.escape.neighbour import Neighbour
from tests.escape.payload import SOURCE

_SETTLE_S = 15.0
_RULES = "network: {allow: [{host: 0.0.0.0/0}, {host: '::/0'}, {host: 127.0.0.1}]}"
"""What sandboxes may ask for: without rules of their own they have no network."""
_AT_ONCE = 6
"""Quiet attacks that are tried beside each other."""
_EVENT_S = 8.0
"""The server looks at sandboxes that give no sign of a limit every few seconds."""


@dataclass(frozen=True)
class Outcome:
    """How an attack ended."""

    text: str
    kinds: tuple[str, ...]
    """Events recorded meanwhile, without the trail of calls."""
    called: bool
    """Whether the trail of calls names what it ran."""


class Arena:
    """One server of one backend."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.patience_s = 60.0 if backend == "qemu" else 30.0
        self.slow = 3.0 if backend == "qemu" else 1.0
        """By how much longer attempts may take."""
        self.short_s = 1.0 if backend in ("namespaces", "plain") else 3.0
        """A timeout that is too short for what is to be stopped, and long enough to start it."""
        self.files = {**FILES, "attempts.py": SOURCE.encode()}
        self._mine: list[ManagedSandbox] = []
        self._seen = 0
        """Number of an event before which nothing matters any more."""
        self._ended: dict[str, Outcome] = {}

    def start(self) -> None:
        """Start the server. Raises BackendUnavailable where the backend does not work."""
        self.runner = asyncio.Runner()
        self.host = Host()
        self.host.warm = 40 if self.backend == "gvisor" else 0
        os.environ["ESCAPE_SECRET"] = self.host.secret
        try:
            with tempfile.NamedTemporaryFile("w", prefix="rules-") as rules:
                rules.write(_RULES)
                rules.flush()
                options = ["--audit-calls", "--policy", rules.name]
                self._server = LocalEnvd(self.backend, log_level="error", options=options)
                self._server.__enter__()
        finally:
            os.environ.pop("ESCAPE_SECRET")
        self.address = self._server.address
        self.runner.run(self._open())

    def stop(self) -> None:
        """Stop the server; nothing of it may be left."""
        self.runner.run(self.client.__aexit__(None, None, None))
        self._server.__exit__(None, None, None)
        self.host.close()
        self.runner.close()

    def run(self, attack: Attack, selected: Sequence[Attack] = ()) -> Outcome:
        """Run an attack, see that nothing else was harmed, and leave nothing of it.

        Of those selected, quiet ones are run beside a quiet one.
        """
        if attack.name not in self._ended:
            beside = [each for each in selected if each.quiet and self._due(each) and each != attack]
            self.runner.run(self._run([attack, *(beside[: _AT_ONCE - 1] if attack.quiet else ())]))
        return self._ended[attack.name]

    def _due(self, attack: Attack) -> bool:
        return attack.name not in self._ended and self.backend not in attack.not_on

    async def _open(self) -> None:
        self.client = await OperationsClient(self.address).__aenter__()
        self.template = await self.client.put_template(self.files)
        self.neighbour = await Neighbour.start(self.client, self.template, self.patience_s)
        assert self._server._process is not None
        self.host.watch(self._server._process.pid, Path(self.address.removeprefix("unix:")).parent)
        for _ in range(2):
            await (await self.client.create(self.template, limits=SMALL)).close()
        await self.verified({})
        await self._settled_at_first()

    async def _settled_at_first(self) -> None:
        await asyncio.sleep(1.0)
        self.host.remember()

    async def _run(self, attacks: Sequence[Attack]) -> None:
        try:
            ended = await asyncio.gather(*map(self._watched, attacks))
        finally:
            await asyncio.gather(*(sandbox.close() for sandbox in self._mine))
            self._mine.clear()
        try:
            await self.neighbour.look()
            assert await self.neighbour.beats(), "the neighbour's process stands still"
            await self.host.settle(_SETTLE_S)
        except AssertionError as error:
            error.add_note(f"tried beside each other: {', '.join(attack.name for attack in attacks)}")
            raise
        self._ended |= {attack.name: outcome for attack, outcome in zip(attacks, ended, strict=True)}

    async def _watched(self, attack: Attack) -> Outcome:
        """Try it; with what is recorded of its own sandbox, where it has just one, or of all."""
        since = self._seen = max(
            [event.number async for event in self.client.audit(after=self._seen)], default=self._seen
        )
        text, own = await self.tried(attack)
        return Outcome(text, *await self._recorded(since, attack, own))

    async def tried(self, attack: Attack) -> tuple[str, str]:
        """What is said of an attempt, and the id of its sandbox where it has just one."""
        if attack.act is not None:
            return await attack.act(self), ""
        if attack.verify is not None:
            return await self.verified(attack.verify, hidden=attack.hidden or HIDDEN), ""
        sandbox = await self.sandbox(limits=attack.limits, **attack.create)
        return await self._said(attack, sandbox), sandbox.id

    async def _recorded(self, since: int, attack: Attack, sandbox_id: str) -> tuple[tuple[str, ...], bool]:
        """Kinds of the events since, once what must be there is there or the server has had time to look at all
        sandboxes; and whether the trail of calls names the attack.
        """
        expected, mark = attack.told_on(self.backend), json.dumps(attack.called)[1:-1]
        deadline = time.monotonic() + _EVENT_S
        while True:
            events = [event async for event in self.client.audit(sandbox_id=sandbox_id, after=since)]
            kinds = tuple(event.kind for event in events if event.kind not in TRAIL)
            called = any(event.kind in TRAIL and mark in event.detail_json for event in events)
            if (expected & set(kinds) if expected else called) or time.monotonic() > deadline:
                return kinds, called
            await asyncio.sleep(0.2)

    async def _said(self, attack: Attack, sandbox: ManagedSandbox) -> str:
        """What its script or command says in a sandbox."""
        command = attack.shell or f"python3 {attack.file}"
        timeout_s = attack.timeout_s * self.slow
        call = ToolCall("exec", {"command": command, "timeout_s": timeout_s})
        try:
            if attack.script:
                await sandbox.files.write(attack.file, f"from attempts import *\n{attack.script}".encode())
            result = await sandbox.call(call, timeout_s=timeout_s + 10)
            if "limit.disk" in attack.audit:
                await attempt("write", sandbox.files.write("next", b"x"))  # as an agent goes on
        except (SandboxGone, ServerUnavailable) as error:
            return f"gone: {error}"
        return f"{result.text}\ntimed_out={result.timed_out}"

    async def sandbox(self, *, limits: Limits = SMALL, **options: Any) -> ManagedSandbox:
        """A sandbox of the attacker's, closed afterwards."""
        return self.keep(await self.client.create(self.template, limits=limits, **options))

    def keep(self, sandbox: ManagedSandbox) -> ManagedSandbox:
        """Have a sandbox closed afterwards."""
        self._mine.append(sandbox)
        return sandbox

    async def verified(
        self, changes: Any, *, hidden: Any = HIDDEN, tests: Sequence[str] = TESTS, timeout_s: float = 20
    ) -> str:
        """The verdict of a final state, in words."""
        sandbox = await self.sandbox()
        for path, content in changes.items():
            await sandbox.files.write(path, content.encode(), mode=0o755)
        diff = await sandbox.finish()
        result = await self.client.verify(self.template, diff, hidden, tests, timeout_s=timeout_s)
        statuses = [outcome.status for outcome in result.outcomes]
        return f"{result.exit} {statuses} {list(result.tampering)} {result.log[-300:]!r}"

    async def left_of(self, marks: Sequence[str]) -> str:
        """Processes on the host whose arguments hold one of the marks, once they had time to end."""
        deadline = time.monotonic() + _SETTLE_S
        while (found := self.host.processes_with(marks)) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        return found

    async def both(self, one: Awaitable[Any], two: Awaitable[Any]) -> tuple[Any, Any]:
        """At the same time."""
        return await asyncio.gather(one, two)


async def attempt(what: str, work: Awaitable[Any]) -> str:
    """How a client's attempt ended, in words."""
    try:
        value = await work
    except (EnvdError, grpc.aio.AioRpcError) as error:
        said = error.details() if isinstance(error, grpc.aio.AioRpcError) else str(error)
        return f"refused {what}: {type(error).__name__} {(said or '')[:150]}"
    except (ValueError, UnicodeError) as error:
        return f"refused {what}: the client itself, {error}"
    return f"BREACH {what}: {value!r:.150}"
