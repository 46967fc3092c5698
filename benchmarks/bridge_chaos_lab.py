"""Processes of the `bridge-chaos` benchmark: a bridge, clients, and a proxy between them, all of which can be hurt."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.bridge_proxy import Proxy
from contracts.errors import TriplaneError
from envd.operations.client import OperationsClient

ROOT = Path(__file__).parent.parent
CLIENTS = 2
_READY_S = 60.0
_END_S = 30.0


class Running:
    """A child that is told lines and answers JSON lines."""

    def __init__(self, process: asyncio.subprocess.Process, heard: Callable[[dict[str, Any]], None]) -> None:
        self.process = process
        self.last: dict[str, Any] = {}
        """Its last line."""
        self._heard, self._new = heard, asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(
        cls, module: str, *arguments: str, heard: Callable[[dict[str, Any]], None] = lambda _: None
    ) -> Running:
        """Start `python -m benchmarks.MODULE`, which ends with this process, and wait for its first line.

        Without code between fork and exec, for which gRPC's own handlers of forks would run in a process full of its
        threads. Raises TriplaneError.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            f"benchmarks.{module}",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])},
        )
        running = cls(process, heard)
        await running.wait_new(module)
        return running

    def tell(self, line: str) -> None:
        """Tell it a line, if it is alive."""
        assert self.process.stdin is not None
        if self.process.returncode is None and not self.process.stdin.is_closing():
            self.process.stdin.write(line.encode() + b"\n")

    async def ask(self, line: str) -> dict[str, Any]:
        """Tell it a line and wait for its next one."""
        self._new.clear()
        self.tell(line)
        await self.wait_new(line)
        return self.last

    async def wait_new(self, what: str) -> None:
        """Wait for its next line. Raises TriplaneError if it ends instead."""
        async with asyncio.timeout(_READY_S):
            await self._new.wait()
        self._new.clear()
        if not self.last:
            raise TriplaneError(
                f"{what}: the process ended with status {await self.process.wait()}: see its errors above"
            )

    async def kill(self) -> None:
        """Kill -9, and wait for its end."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._listening

    async def end(self) -> int:
        """Close its input, wait for its end and return its status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        async with asyncio.timeout(_END_S):
            status = await self.process.wait()
        await self._listening
        return status

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            said = json.loads(line)
            self.last = said
            self._heard(said)
            self._new.set()
        self.last = self.last if self.process.returncode == 0 else {}
        self._new.set()


class Lab:
    """One run: FOLDER/bridge.sock behind FOLDER/proxy.sock, and a log a client."""

    def __init__(self, folder: Path, run: str, envd: str) -> None:
        """envd: address of the server of sandboxes."""
        self._folder, self._run, self._envd = folder, run, envd
        self.proxy = Proxy(folder / "proxy.sock", folder / "bridge.sock")
        self.done: set[int] = set()
        """Episodes that have ended."""
        self.wrong: list[str] = []
        """What stray calls were answered that they must not be."""
        self.answered = 0
        """Stray calls that the bridge has answered."""
        self._allowed = 0

    def log_of(self, part: int) -> Path:
        """The log of a client."""
        return self._folder / f"client-{part}.log"

    async def start(self) -> None:
        """Start everything."""
        await self.proxy.__aenter__()
        self.bridge = await self._bridge()
        self.clients = [await self._client(part) for part in range(CLIENTS)]

    def allow(self, episodes: int) -> None:
        """Allow the clients to play all episodes with smaller numbers."""
        self._allowed = episodes
        for client in self.clients:
            client.tell(str(episodes))

    async def kill_bridge(self) -> None:
        """Kill the bridge and start it again at once."""
        await self.bridge.kill()
        self.bridge = await self._bridge()

    async def kill_client(self, part: int) -> None:
        """Kill a client and start it again at once."""
        await self.clients[part].kill()
        self.clients[part] = await self._client(part)
        self.clients[part].tell(str(self._allowed))

    def lose_engine(self) -> None:
        """Let the engine lose what it samples."""
        self.bridge.process.send_signal(signal.SIGUSR1)

    async def wait_done(self, episodes: int, seconds: float) -> None:
        """Wait until so many episodes have ended, or a client has, or the time is over."""
        async with asyncio.timeout(seconds):
            while len(self.done) < episodes and all(each.process.returncode is None for each in self.clients):
                await asyncio.sleep(0.05)

    async def finish(self) -> None:
        """Let the clients end by themselves."""
        for client in self.clients:
            said = await client.ask("end")
            while "wrong" not in said:
                await client.wait_new("end")
                said = client.last
            self.wrong += said["wrong"]
            await client.end()

    async def abandon(self, episodes: int) -> None:
        """Let one more client begin episodes, and kill it for good."""
        arguments = (f"{self._run}x", self.proxy.address, str(self._folder / "abandoned.log"), "0", "1")
        client = await Running.start("bridge_chaos_client", *arguments)
        client.tell(str(episodes))
        while not await self.open_episodes() or not await self.sandboxes():
            await asyncio.sleep(0.01)
        await client.kill()

    async def open_episodes(self) -> int:
        """Episodes that are open at the bridge."""
        return int((await self.bridge.ask("tell"))["open"])

    async def sandboxes(self) -> int:
        """Sandboxes that live."""
        async with OperationsClient(self._envd) as client:
            return (await client.info()).live

    async def end(self) -> None:
        """Let the bridge end by itself."""
        await self.bridge.end()

    async def stop(self) -> None:
        """Kill everything that is still there."""
        for each in [*self.clients, self.bridge]:
            await each.kill()
        await self.proxy.__aexit__()

    async def _bridge(self) -> Running:
        return await Running.start("bridge_chaos_server", str(self._folder), self._envd)

    async def _client(self, part: int) -> Running:
        arguments = (self._run, self.proxy.address, str(self.log_of(part)), str(part), str(CLIENTS))
        return await Running.start("bridge_chaos_client", *arguments, heard=self._heard)

    def _heard(self, said: dict[str, Any]) -> None:
        if "done" in said:
            self.done.add(said["done"])
        self.answered += "answered" in said
