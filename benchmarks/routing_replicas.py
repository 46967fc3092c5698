"""Simulated replicas of the `routing` benchmark, each at a port of its own, in one process.

    python -m benchmarks.routing_replicas PORTS SPEED PREFILL DECODE SLOTS ROOM     PORTS separated by commas

A replica has pages of BLOCK tokens and drops those used least recently. It computes prompts one after the other, and
samples for `SLOTS` requests at once. Simulated seconds pass SPEED times as fast as real ones.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from benchmarks.routing_load import BLOCK, answer, block_keys, text_of, tokens_of

MODEL = "simulated"
_SAMPLE_S = 0.02
"""Real seconds between two looks at the load."""


@dataclass(frozen=True)
class Machine:
    """What a replica runs on."""

    prefill: float
    """Prompt tokens a second."""
    decode: float
    """Sampled tokens of a sequence a second."""
    slots: int
    """Sequences at once."""
    room: int
    """Pages of the cache."""

    def halved(self) -> Machine:
        """At half speed."""
        return replace(self, prefill=self.prefill / 2, decode=self.decode / 2)


class Replica:
    """A simulated replica. Its times are seconds of the running event loop's clock."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._slots = machine, asyncio.Semaphore(machine.slots)
        self._pages = OrderedDict[int, None]()
        self._prefill = asyncio.Lock()
        self.computed = 0
        """Prompt tokens."""
        self.flying: list[int] = []
        """Tokens of each request in flight, prompt and output."""

    async def complete(self, tokens: list[int], count: int, conversation: str, turn: int) -> list[int]:
        """Compute a prompt, and sample `count` tokens."""
        self.flying.append(len(tokens) + count)
        try:
            async with self._slots:
                keys = block_keys(tokens)
                async with self._prefill:
                    computed = len(tokens) - self._cached(keys)
                    self.computed += computed
                    await asyncio.sleep(computed / self._machine.prefill)
                    self._keep(keys)
                await asyncio.sleep(count / self._machine.decode)
                made = answer(conversation, turn, count)
                self._keep(block_keys(tokens + made))
                return made
        finally:
            self.flying.remove(len(tokens) + count)

    def _cached(self, keys: list[int]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self._pages), len(keys)) * BLOCK

    def _keep(self, keys: list[int]) -> None:
        for key in reversed(keys):  # the beginning of a prompt was used last
            self._pages[key] = None
            self._pages.move_to_end(key)
        while len(self._pages) > self._machine.room:
            self._pages.popitem(last=False)


class Imbalance(NamedTuple):
    """Tokens in flight of the fullest replica."""

    over_mean: float
    over_least: float
    """Over the lower bound of any assignment of these requests: the mean, or the largest request if that is more."""


def imbalance(replicas: Collection[Replica]) -> Imbalance | None:
    """Imbalance of the requests in flight; None if there are none."""
    loads = [sum(each.flying) for each in replicas]
    if not any(loads):
        return None
    mean, largest = sum(loads) / len(loads), max(max(each.flying, default=0) for each in replicas)
    return Imbalance(max(loads) / mean, max(loads) / max(mean, largest))


def mean_of(samples: Sequence[Imbalance]) -> Imbalance:
    """Means of samples; 0: there are none."""
    return Imbalance(*map(fmean, zip(*samples, strict=True))) if samples else Imbalance(0.0, 0.0)


class Replicas:
    """All replicas, by port."""

    def __init__(self, ports: list[int], machine: Machine) -> None:
        self._ports, self._machine = ports, machine
        self._found: dict[int, Replica] = {}
        self._imbalance: list[Imbalance] = []

    def starlette(self) -> Starlette:
        """The ASGI application of all ports."""
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/completions", self._complete, methods=["POST"]),
                Route("/reset", self._reset, methods=["POST"]),
                Route("/measured", self._measured),
            ]
        )

    async def watch(self) -> None:
        """Look at the load until cancelled."""
        while True:
            if found := imbalance(self._found.values()):
                self._imbalance.append(found)
            await asyncio.sleep(_SAMPLE_S)

    async def _health(self, request: Request) -> JSONResponse:
        return JSONResponse({})

    async def _models(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "simulated"}]})

    async def _reset(self, request: Request) -> JSONResponse:
        slow = int(request.query_params.get("slow", -1))
        half = self._machine.halved()
        self._found = {
            port: Replica(half if place == slow else self._machine) for place, port in enumerate(self._ports)
        }
        self._imbalance.clear()
        return JSONResponse({})

    async def _measured(self, request: Request) -> JSONResponse:
        computed = sum(each.computed for each in self._found.values())
        return JSONResponse({"computed": computed, "imbalance": self._imbalance})

    async def _complete(self, request: Request) -> JSONResponse:
        body: dict[str, Any] = await request.json()
        tokens = tokens_of(body["prompt"])
        conversation, turn, count = json.loads(body["user"])
        replica = self._found[request.scope["server"][1]]
        made = await replica.complete(tokens, count, conversation, turn)
        choice = {"index": 0, "text": text_of(made), "finish_reason": "length"}
        usage = {"prompt_tokens": len(tokens), "completion_tokens": count, "total_tokens": len(tokens) + count}
        about = {"id": f"{conversation}.{turn}", "object": "text_completion", "created": 0, "model": MODEL}
        return JSONResponse({**about, "choices": [choice], "usage": usage})


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
    machine = Machine(prefill * speed, decode * speed, int(sys.argv[5]), int(sys.argv[6]))
    asyncio.run(_main(numbers, Replicas(numbers, machine)))
