"""Runs a coroutine against a server, with a sandbox of its own."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from contracts.rpc.listening import Listening
from envd.client import Access, Limits, ToolCall, ToolResult, VerifyResult
from envd.operations.client import ManagedSandbox, OperationsClient
from envd.server.serve import Options, serve

T = TypeVar("T")
FILES = {
    "calc.py": b"def add(a, b):\n    return a - b\n",
    "tests/test_calc.py": b"from calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n",
}
HIDDEN = {
    "tests/test_hidden.py": (
        b"from calc import add\n\n\ndef test_small():\n    assert add(1, 2) == 3\n\n\n"
        b"def test_zero():\n    assert add(0, 0) == 0\n"
    )
}
TESTS = ("tests/test_hidden.py::test_small", "tests/test_hidden.py::test_zero")
FIX = ToolCall("edit", {"path": "calc.py", "line": 2, "new": "    return a + b"})


class Harness:
    """One server's address, and ways to use it from a plain test function."""

    def __init__(self, address: str) -> None:
        self.address = address

    def client(self, job: Callable[[OperationsClient], Awaitable[T]]) -> T:
        async def run() -> T:
            async with OperationsClient(self.address) as client:
                return await job(client)

        return asyncio.run(run())

    def sandbox(
        self,
        job: Callable[[ManagedSandbox], Awaitable[T]],
        *,
        files: Mapping[str, bytes] = FILES,
        **options: Any,
    ) -> T:
        async def run(client: OperationsClient) -> T:
            template = await client.put_template(files)
            async with await client.create(template, **options) as sandbox:
                return await job(sandbox)

        return self.client(run)

    def calls(self, *calls: ToolCall, timeout_s: float = 10, **options: Any) -> list[ToolResult]:
        """Results of calls made one after another in a fresh sandbox."""

        async def job(sandbox: ManagedSandbox) -> list[ToolResult]:
            return [await sandbox.call(call, timeout_s=timeout_s) for call in calls]

        return self.sandbox(job, **options)

    def shell(self, *commands: str, timeout_s: float = 10, **options: Any) -> list[str]:
        """Texts of commands run one after another in a fresh sandbox."""
        calls = [ToolCall("exec", {"command": command}) for command in commands]
        return [result.text for result in self.calls(*calls, timeout_s=timeout_s, **options)]

    def verify(
        self,
        changes: Mapping[str, str],
        *,
        files: Mapping[str, bytes] = FILES,
        hidden: Mapping[str, bytes] = HIDDEN,
        tests: tuple[str, ...] = TESTS,
        **options: Any,
    ) -> VerifyResult:
        """Write files in a sandbox, finish it, and verify its diff."""

        async def job(client: OperationsClient) -> VerifyResult:
            template = await client.put_template(files)
            sandbox = await client.create(template)
            for path, content in changes.items():
                await sandbox.call(ToolCall("write", {"path": path, "content": content}))
            return await client.verify(template, await sandbox.finish(), hidden, tests, **options)

        return self.client(job)


SMALL = Limits(memory_mb=96, pids=16)


@asynccontextmanager
async def served(tmp_path: Path, *keys: str) -> AsyncIterator[OperationsClient]:
    """A server in this process, and what its loop could tell nobody of: at the end, nothing. keys: bearer keys that it
    accepts, of which the client has the first.
    """
    unheard: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(str(context)))
    (tmp_path / "keys").write_text("\n".join(keys))
    listening = Listening(f"unix:{tmp_path}/s", key_file=tmp_path / "keys" if keys else None)
    serving = asyncio.ensure_future(serve(Options(listening, ("plain",), tmp_path / "state")))
    try:
        async with OperationsClient(listening.address, Access(key=keys[0]) if keys else None) as client:
            await client.info()  # it has started
            yield client
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving
        gc.collect()
        await asyncio.sleep(0)
    assert not unheard


def require_limits(enforced: Collection[str], *limits: str) -> None:
    """Skip a test if its backend can't enforce these limits, for lack of writable control groups.

    enforced: `limits_enforced` of the backend or of the server.
    """
    missing = [limit for limit in limits if limit not in enforced]
    if missing:
        pytest.skip(f"no writable control groups here, so the backend does not limit {' and '.join(missing)}")


def closed_above(path: Path) -> str:
    """The first directory above a path that other users can't enter."""
    return next((str(each) for each in reversed(path.parents) if not each.stat().st_mode & 0o001), "")
