"""Verifications: grade final states in fresh sandboxes, on the backend of the agent's sandboxes.

namespaces, plain    forked by a zygote that has all modules imported
any other            a fresh sandbox of that backend, into which the verifier is sent (guest_verifications.py)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from contracts.rpc import caller
from envd.backends.base import Backend, BoxSpec, Runtime
from envd.errors import EnvdError, ServerBusy
from envd.sandbox import wire
from envd.server.compiled_files import CompiledFiles, key_of, modules_of
from envd.server.exporting import patterns_of
from envd.server.guest_bundle import bundle
from envd.server.guest_verifications import verify_in_guest
from envd.server.runtimes import Runtimes
from envd.server.templates import Templates
from envd.server.zygotes import Zygote
from envd.types import Limits

_ASK_S = 60.0
"""Seconds beyond the tests' own deadline after which a verifier counts as hung."""
_GUEST_S = 180.0
"""The same for a verifier in a guest, whose processor may be emulated."""
_COMPILE_S, _COMPILE_MB = 60.0, 1024
"""Seconds and least MiB to compile files in: a task's small limits must not keep byte code from its runs."""
_TEST = re.compile(r"(.*/)?(test_[^/]*|[^/]*_test)\.py")
_REWRITING = "enable_assertion_pass_hook"
"""Key of pytest's configuration that changes how assertions are rewritten."""
_OF = {"auto": "namespaces", "namespaces": "namespaces", "plain": "plain"}
"""Kind of zygote by requested backend."""


class Verifications:
    """Runs verifications, at most one per core at a time, and two of those that end if they only wait (`idle_s`).

    Those of several bearer keys begin in turn.
    """

    def __init__(self, zygotes: Mapping[str, Zygote], templates: Templates, runtimes: Runtimes) -> None:
        """zygotes: by the name of the backend that they verify for."""
        self._zygotes, self._templates, self._runtimes = dict(zygotes), templates, runtimes
        cores = os.cpu_count() or 1
        self._slots, self._slots_of_waiting = Slots(cores), Slots(2 * cores)
        self._count = self._running = 0
        self._tests, self._modules = CompiledFiles(), CompiledFiles()

    @property
    def idle(self) -> bool:
        """Whether none runs or waits."""
        return not self._running

    async def verify(
        self,
        backend: Backend,
        template: str,
        diff: bytes,
        hidden: Mapping[str, bytes],
        tests: Sequence[str],
        limits: Limits,
        timeout_s: float,
        patience_s: float | None = None,
        artifacts: Sequence[str] = (),
        product: Sequence[str] = (),
        runtime: str = "",
        plugins: Sequence[str] = (),
        ini: Mapping[str, str] = {},
        idle_s: float = 0,
    ) -> dict[str, Any]:
        """Grade a final state in a fresh sandbox and return the verifier's result.

        Raises ServerBusy if no slot is free within `patience_s` seconds (None: no bound), and EnvdError for artifacts
        that are not valid patterns.
        """
        patterns_of(artifacts)
        digest = self._templates.require(template)
        packages = self._runtimes.require(runtime, backend)
        files = sorted(hidden.items())
        header = {
            "op": "verify",
            "diff_bytes": len(diff),
            "hidden": [[path, len(content)] for path, content in files],
            "tests": list(tests),
            "timeout_s": timeout_s,
            "artifacts": list(artifacts),
            "product": list(product),
            "plugins": list(plugins),
            "ini": dict(ini),
            "idle_s": idle_s,
        }
        blob = diff + b"".join(content for _, content in files)
        slots = self._slots_of_waiting if idle_s else self._slots
        with self._templates.held(digest), self._runtimes.held(packages), self._counted():
            name = await self._templates.ready_for_verdict(digest)
            try:
                async with asyncio.timeout(patience_s):
                    await slots.acquire()
            except TimeoutError as error:
                raise ServerBusy(f"no verification slot became free within {patience_s:g} s: retry") from error
            try:
                if backend.name in self._zygotes:
                    reply = await self._by_zygote(backend.name, name, limits, header, blob, packages, hidden)
                else:
                    spec = self._spec(name, limits, packages)
                    reply = await verify_in_guest(backend, spec, wire.pack(header, blob), timeout_s + _GUEST_S)
            finally:
                slots.release()
        return dict(reply["result"])

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def _by_zygote(
        self,
        backend: str,
        template: str,
        limits: Limits,
        header: dict[str, Any],
        blob: bytes,
        runtime: Runtime | None,
        hidden: Mapping[str, bytes],
    ) -> dict[str, Any]:
        cold = await asyncio.to_thread(bundle, False) if runtime and not runtime.is_ours else b""
        # elsewhere byte code would name another path of the file, or be another pytest's
        if backend == "namespaces" and not cold:
            for kind, codes in (await self._byte_code(template, limits, header, hidden)).items():
                header = header | {kind: [[path, len(code)] for path, code in codes.items()]}
                blob += b"".join(codes.values())
        link = await self._zygotes[backend].spawn(template, limits, {}, runtime=runtime, cold=cold)
        try:
            reply, _ = await link.ask(header, blob, timeout_s=header["timeout_s"] + _ASK_S)
        finally:
            link.close()
        return reply

    async def _byte_code(
        self, template: str, limits: Limits, header: dict[str, Any], hidden: Mapping[str, bytes]
    ) -> dict[str, dict[str, bytes]]:
        """Byte code of the hidden test files, and of the template's modules, by path."""
        # also of files that do not run: a decoy leaves tests out, and byte code must not tell it from a real run
        files = {test.split("::", 1)[0] for test in header["tests"]} | set(filter(_TEST.fullmatch, hidden))
        rewritten = files & hidden.keys() if _REWRITING not in header["ini"] else ()
        tests = {path: key_of(path, hidden[path]) for path in rewritten if path.endswith(".py")}
        directory = self._templates.directory_of(template)
        modules = await asyncio.to_thread(modules_of, directory)
        limits = replace(limits, memory_mb=max(limits.memory_mb, _COMPILE_MB), cpu=max(limits.cpu, 1.0))

        async def compiled(read: Callable[[str], bytes], rewritten: bool, paths: Sequence[str]) -> dict[str, bytes]:
            files = [(path, await asyncio.to_thread(read, path)) for path in paths]
            asking = {"op": "compile", "files": [[path, len(content)] for path, content in files]}
            link = await self._zygotes["namespaces"].spawn(template, limits, {})
            try:
                blob = b"".join(content for _, content in files)
                said, codes = await link.ask(asking | {"rewritten": rewritten}, blob, timeout_s=_COMPILE_S)
            finally:
                link.close()
            return wire.cut(codes, said["codes"])[0]

        return {
            "compiled": await self._tests.of(tests, partial(compiled, hidden.__getitem__, True)),
            "modules": await self._modules.of(
                modules, partial(compiled, lambda path: (directory / path).read_bytes(), False)
            ),
        }

    def _spec(self, template: str, limits: Limits, runtime: Runtime | None) -> BoxSpec:
        self._count += 1
        directory = self._templates.directory_of(template)
        env = runtime.environment({}) if runtime else {}
        return BoxSpec(f"verify-{self._count}", template, directory, limits, runtime, env, supervised=True)

    async def died(self) -> str:
        """Wait until a zygote ends by itself, and return an error text."""
        deaths = [asyncio.ensure_future(each.died()) for each in self._zygotes.values()]
        if not deaths:
            await asyncio.get_running_loop().create_future()  # no zygotes: wait without end
        try:
            await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
            return next(each.result() for each in deaths if each.done())
        finally:
            for each in deaths:
                each.cancel()

    async def stop(self) -> None:
        """Stop the zygotes and the processes that they forked."""
        await asyncio.gather(*(each.stop() for each in self._zygotes.values()))


class Slots:
    """A semaphore whose waiters get it in turn by bearer key."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting = caller.Turns[asyncio.Future[None]]()

    async def acquire(self) -> None:
        """Wait for a slot."""
        if self._free:
            self._free -= 1
            return
        given = asyncio.get_running_loop().create_future()
        self._waiting.add(given)
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Give a slot to the next waiter, if there is one."""
        while self._waiting:
            given = self._waiting.take()
            if not given.done():
                given.set_result(None)
                return
        self._free += 1


class Starting:
    """Zygotes of the requested backends, started concurrently with these, since both are slow to start."""

    def __init__(self, names: Sequence[str], run_dir: Path) -> None:
        self._zygotes = {
            kind: asyncio.ensure_future(Zygote.start(run_dir, f"{run_dir.name}-verifier-{kind}", kind))
            for kind in {_OF[name] for name in names if name in _OF}
        }

    async def finished(
        self, backends: Mapping[str, Backend], templates: Templates, runtimes: Runtimes
    ) -> Verifications:
        """Verifications with the zygotes of the started backends; stops the others. Raises BackendUnavailable."""
        try:
            for kind in [kind for kind in self._zygotes if kind not in backends]:
                await self._let_go(self._zygotes.pop(kind))
            zygotes = {kind: await starting for kind, starting in self._zygotes.items()}
            return Verifications(zygotes, templates, runtimes)
        except BaseException:
            await self.abandon()
            raise

    async def abandon(self) -> None:
        """Stop all zygotes once they have started."""
        await asyncio.gather(*map(self._let_go, self._zygotes.values()))

    async def _let_go(self, starting: asyncio.Future[Zygote]) -> None:
        with contextlib.suppress(EnvdError, asyncio.CancelledError):
            await (await starting).stop()
