"""Simulated replicas of the `routing` benchmark, each at a port of its own, in one process.

    python -m benchmarks.routing_replicas PORTS SPEED PREFILL DECODE SLOTS ROOM     PORTS separated by commas

A replica has pages of BLOCK tokens and drops those used least recently. It computes prompts one after the other, and
samples for `SLOTS` requests at once. Simulated seconds pass SPEED times as fast as real ones.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from benchmarks.routing_load import BLOCK, answer, block_keys

_SAMPLE_S = 0.02
"""Real seconds between two looks at the load."""


@dataclass
class _Replica:
    slots: asyncio.Semaphore
    pages: OrderedDict[int, None] = field(default_factory=OrderedDict)
    prefill: asyncio.Lock = field(default_factory=asyncio.Lock)
    computed: int = 0
    """Prompt tokens."""
    flying: int = 0
    """Tokens of requests in flight, prompt and output."""

    def cached(self, keys: list[int]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self.pages), len(keys)) * BLOCK

    def keep(self, keys: list[int], room: int) -> None:
        for key in reversed(keys):  # the beginning of a prompt was used last
            self.pages[key] = None
            self.pages.move_to_end(key)
        while len(self.pages) > room:
            self.pages.popitem(last=False)


class Replicas:
    """All replicas, by port."""

    def __init__(self, ports: list[int], speed: float, prefill: float, decode: float, slots: int, room: int) -> None:
        """prefill, decode: simulated tokens/s of a replica and of a sequence. room: pages of a replica."""
        self._ports, self._speed, self._prefill, self._decode = ports, speed, prefill, decode
        self._slots, self._room = slots, room
        self._found: dict[int, _Replica] = {}
        self._imbalance: list[float] = []

    def starlette(self) -> Starlette:
        """The ASGI application of all ports."""
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/reset", self._reset, methods=["POST"]),
                Route("/measured", self._measured),
            ]
        )

    async def watch(self) -> None:
        """Look at the load until cancelled."""
        while True:
            loads = [each.flying for each in self._found.values()]
            if sum(loads):
                self._imbalance.append(max(loads) * len(loads) / sum(loads))
            await asyncio.sleep(_SAMPLE_S)

    async def _health(self, request: Request) -> JSONResponse:
        return JSONResponse({})

    async def _reset(self, request: Request) -> JSONResponse:
        self._found = {port: _Replica(asyncio.Semaphore(self._slots)) for port in self._ports}
        self._imbalance.clear()
        return JSONResponse({})

    async def _measured(self, request: Request) -> JSONResponse:
        computed = sum(each.computed for each in self._found.values())
        return JSONResponse({"computed": computed, "imbalance": self._imbalance})

    async def _complete(self, request: Request) -> JSONResponse:
        body: dict[str, Any] = await request.json()
        tokens, count = body["prompt"], body["sampled"]
        replica = self._found[request.scope["server"][1]]
        replica.flying += len(tokens) + count
        try:
            async with replica.slots:
                keys = block_keys(tokens)
                async with replica.prefill:
                    computed = len(tokens) - replica.cached(keys)
                    replica.computed += computed
                    await asyncio.sleep(computed / self._prefill / self._speed)
                    replica.keep(keys, self._room)
                await asyncio.sleep(count / self._decode / self._speed)
                made = answer(body["conversation"], body["turn"], count)
                replica.keep(block_keys(tokens + made), self._room)
        finally:
            replica.flying -= len(tokens) + count
        usage = {"prompt_tokens": len(tokens), "completion_tokens": count}
        return JSONResponse({"object": "text_completion", "choices": [{"token_ids": made}], "usage": usage})


async def _main(ports: list[int], replicas: Replicas) -> None:
    sockets = []
    for port in ports:
        sockets.append(socket.create_server(("127.0.0.1", port), backlog=1024))
    server = uvicorn.Server(uvicorn.Config(replicas.starlette(), log_level="warning", timeout_keep_alive=600))
    watching = asyncio.create_task(replicas.watch())
    await server.serve(sockets)
    watching.cancel()


if __name__ == "__main__":
    numbers = [int(port) for port in sys.argv[1].split(",")]
    speed, prefill, decode = map(float, sys.argv[2:5])
    asyncio.run(_main(numbers, Replicas(numbers, speed, prefill, decode, int(sys.argv[5]), int(sys.argv[6]))))
