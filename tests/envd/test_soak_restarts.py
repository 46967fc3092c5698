"""A server is killed with sandboxes alive, and the next one of the same directory starts at once: it serves as the
first did, and leaves nothing of either.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from benchmarks.envd_leftovers import Leftovers, look
from contracts.owned import owned_directory
from envd.client import SandboxGone, ToolCall
from envd.operations.client import ManagedSandbox, OperationsClient
from envd.sandbox.cgroups import OWNED
from envd.sandbox.proctree import descendants
from tests.envd.gvisors import require_runsc
from tests.envd.harness import FILES, FIX

ROOT = Path(__file__).resolve().parents[2]
READ = ToolCall("read", {"path": "calc.py"})


class Servers:
    """Servers of one directory, one after the other."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.address = f"unix:{folder}/sock"
        self.folder, self.state, self._backend = folder, folder / "state", backend
        self.pids: set[int] = set()

    @contextmanager
    def serving(self) -> Iterator[subprocess.Popen[bytes]]:
        (self.folder / "sock").unlink(missing_ok=True)
        command = [sys.executable, "-m", "envd", "serve", "--listen", self.address, "--backend", self._backend]
        command += ["--pool", "1", "--log-level", "error", "--state-dir", str(self.state)]
        command += ["--snapshot-dir", str(self.folder / "kept"), "--with-parent", str(os.getpid())]
        environment = {**os.environ, "TMPDIR": str(self.folder), "PYTHONPATH": str(ROOT)}
        server = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        self.pids.add(server.pid)
        try:
            yield server
        finally:
            server.terminate()
            server.wait(60)

    def left(self) -> Leftovers:
        """Of all of them, but for the snapshot that is to be kept."""
        found = look(self.folder, self.pids)
        files = {path for path in found.files if "/kept" not in path.removeprefix(str(self.folder))}
        return Leftovers(processes_of(self.folder), found.mounts, found.cgroups, frozenset(files))


def processes_of(folder: Path) -> frozenset[int]:
    """Those that name a directory in their command lines."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.fsencode(folder) in (process / "cmdline").read_bytes():
                found.add(int(process.name))
    return frozenset(found)


def alone(server: int) -> None:
    """What it started learns of it by itself, and cleans up while the next one starts."""
    os.kill(server, signal.SIGKILL)


def with_all_that_it_started(server: int) -> None:
    """Stopped first: none of them tidies up after another."""
    family = [server, *descendants(server)]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in family:
            with suppress(ProcessLookupError):  # process 1 of a sandbox takes the others along
                os.kill(pid, number)


async def fill(client: OperationsClient) -> tuple[list[ManagedSandbox], str, tuple[str, ...]]:
    """Sandboxes in every state; also a snapshot, and which limits hold."""
    template = await client.put_template(FILES)
    running, paused, hibernated, busy = [await client.create(template) for _ in range(4)]
    await running.call(ToolCall("exec", {"command": "setsid sleep 1000 >/dev/null 2>&1 & sleep 1000 &"}))
    await running.call(FIX)
    snapshot, _ = await running.snapshot()
    info = await client.info()
    if "pause" in info.backends[0].features:
        await paused.pause()
    await hibernated.hibernate()
    await busy.processes.start(["sh", "-c", "while :; do :; done"])
    return [running, paused, hibernated, busy], snapshot, tuple(info.limits_enforced)


async def as_before(
    client: OperationsClient, old: list[ManagedSandbox], snapshot: str, limits: tuple[str, ...]
) -> None:
    """What the next server does."""
    assert tuple((await client.info()).limits_enforced) == limits
    assert await client.list() == []
    for each in old:
        with pytest.raises(SandboxGone):
            await ManagedSandbox(client, each.handle).call(READ)
    async with await client.restore(snapshot) as restored:
        assert "a + b" in (await restored.call(READ)).text
    template = await client.put_template(FILES)
    for _ in range(4):  # for a while: what the killed one started must not clean up after the living
        async with await client.create(template) as sandbox:
            assert (await sandbox.call(ToolCall("exec", {"command": "cat calc.py | wc -l"}))).text == "2\nexit 0"
        await asyncio.sleep(0.3)


@pytest.mark.slow
@pytest.mark.parametrize("kill", [alone, with_all_that_it_started], ids=lambda kill: kill.__name__)
@pytest.mark.parametrize("backend", ["namespaces", "gvisor"])
def test_the_next_server_of_a_directory_serves_as_the_killed_one_did(backend: str, kill: Callable[[int], None]) -> None:
    if backend == "gvisor":
        require_runsc()

    async def first(servers: Servers) -> tuple[list[ManagedSandbox], str, tuple[str, ...]]:
        async with OperationsClient(servers.address) as client:
            return await fill(client)

    async def second(servers: Servers, old: list[ManagedSandbox], snapshot: str, limits: tuple[str, ...]) -> None:
        async with OperationsClient(servers.address) as client:
            await as_before(client, old, snapshot, limits)

    with owned_directory(OWNED, Path("/tmp")) as made:
        servers = Servers(Path(made) / "d", backend)
        servers.folder.mkdir()
        with servers.serving() as server:
            old, snapshot, limits = asyncio.run(first(servers))
            assert servers.left()
            kill(server.pid)
            server.wait()
        with servers.serving():
            asyncio.run(second(servers, old, snapshot, limits))
        deadline = time.monotonic() + 20
        while (left := servers.left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left
        assert [path.name for path in (servers.folder / "kept").iterdir()] == [snapshot]
