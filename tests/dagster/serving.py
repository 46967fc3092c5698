"""Processes of `triplane serve --follow`, a balancer that follows their /ready, and a load of requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


class Server:
    """A sampler of experiment `name`, started without waiting for anything."""

    def __init__(self, store: str, name: str, *options: str) -> None:
        command = [sys.executable, "-m", "triplane_dagster.cli", "serve", "-e", name, "--follow", "--poll", "0.1"]
        self.process = subprocess.Popen(
            [*command, "--listen", "127.0.0.1:0", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TRIPLANE_STORE": store, "OMP_NUM_THREADS": "1"},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stdout or ()), daemon=True)
        self._reader.start()

    @property
    def printed(self) -> str:
        """Everything that it printed so far."""
        return "".join(self.lines)

    async def address(self) -> str:
        """host:port, once it listens."""
        while (found := re.search(r" at http://([\d.]+:[1-9]\d*)/v1", self.printed)) is None:
            assert self.process.poll() is None, self.printed
            await asyncio.sleep(0.05)
        return found[1]

    async def ready(self, code: int) -> dict[str, Any]:
        """Body of /ready once it answers with this status."""
        address = await self.address()
        async with httpx.AsyncClient(timeout=30) as http:
            while (answer := await http.get(f"http://{address}/ready")).status_code != code:
                assert self.process.poll() is None, self.printed
                await asyncio.sleep(0.05)
        return dict(answer.json())

    def ended(self, timeout_s: float) -> int:
        """Exit code."""
        code = self.process.wait(timeout_s)
        self._reader.join(10)
        return code

    def end(self) -> None:
        """Kill it if it runs, and close its pipe."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        if self.process.stdout is not None:
            self.process.stdout.close()


@dataclass
class Balancer:
    """Forwards TCP connections in turn to the servers that were ready at the last look, as a Service does: a connection
    stays with its server, and a change takes `look_s` seconds to be seen.
    """

    servers: Sequence[str]
    look_s: float = 0.5
    endpoints: list[str] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """host:port."""
        self._turn = itertools.count()
        looking = asyncio.create_task(self._look())
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            looking.cancel()
            server.close()

    async def _look(self) -> None:
        async with httpx.AsyncClient(timeout=2) as http:
            while True:
                ready = []
                for server in self.servers:
                    with contextlib.suppress(httpx.HTTPError):
                        if (await http.get(f"http://{server}/ready")).status_code == 200:
                            ready.append(server)
                self.endpoints = ready
                await asyncio.sleep(self.look_s)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self.endpoints[next(self._turn) % len(self.endpoints)].split(":")
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection(host, int(port))
            await asyncio.gather(_copy(reader, back), _copy(there, writer))
        writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


@dataclass
class Load:
    """A constant rate of requests."""

    url: str
    per_second: float
    replies: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send requests during the block, and wait for their replies."""
        stop = asyncio.Event()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        async with httpx.AsyncClient(timeout=60, limits=limits) as http, asyncio.TaskGroup() as group:

            async def send() -> None:
                for number in itertools.count():
                    if stop.is_set():
                        return
                    group.create_task(self._one(http, number))
                    await asyncio.sleep(1 / self.per_second)

            group.create_task(send())
            try:
                yield
            finally:
                stop.set()

    async def _one(self, http: httpx.AsyncClient, number: int) -> None:
        body = {"prompt": [5, 6, 7, 8], "max_tokens": 8, "seed": number, "return_token_ids": True, "logprobs": 1}
        try:
            answer = await http.post(f"{self.url}/completions", json=body)
            if answer.status_code == 200:
                self.replies.append(dict(answer.json()["choices"][0]))
            else:
                self.failures.append(answer.text)
        except httpx.HTTPError as error:
            self.failures.append(repr(error))
