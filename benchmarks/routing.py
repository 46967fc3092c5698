"""Routing over HTTP: simulated replicas behind `python -m inference route`, and behind consistent hashing.

    loads (routing_load) --> router, or a replica by hash --> replicas (routing_replicas) --> what they computed, when

Both get the same requests, in turn, at empty caches. Consistent hashing sends a group, or prompts that begin alike, to
one replica each, and goes without the hop through a router. Groups are also played in virtual time (routing_virtual),
with all replicas equal and with one at half speed, which is each of them once.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from pydantic import Field

from benchmarks.measure import percentile
from benchmarks.result import Options, Result
from benchmarks.routing_load import BLOCK, MOST, Conversation, group_load, least, trace_load
from benchmarks.routing_replicas import Machine
from benchmarks.routing_virtual import Played, play
from contracts.errors import TriplaneError

_PATIENCE_S = 60.0


class RoutingOptions(Options):
    """Options of the `routing` benchmark."""

    trace: str = ""
    """A trace of Mooncake (.jsonl) to replay, too; empty: groups only."""
    requests: int = Field(300, ge=1, le=100_000)
    """Requests of the trace to replay."""
    shrink: int = Field(16, ge=1, le=32)
    """Divisor of the trace's lengths."""
    replicas: int = Field(8, ge=2, le=64)
    """Simulated replicas."""
    groups: int = Field(12, ge=1, le=1000)
    """Groups, all at once."""
    members: int = Field(16, ge=1, le=256)
    """Episodes of a group."""
    turns: int = Field(4, ge=1, le=64)
    """Turns of an episode."""
    prompt: int = Field(2048, ge=16, le=65536)
    """Tokens of a group's prompt."""
    speed: float = Field(1.0, gt=0, le=1000)
    """Simulated seconds in a real one; at more than 1 the router and the client have less time for each request."""
    prefill: float = Field(4000.0, gt=0)
    """Prompt tokens that a replica computes in a simulated second."""
    decode: float = Field(50.0, gt=0)
    """Tokens that a sequence samples in a simulated second."""
    slots: int = Field(32, ge=1)
    """Sequences of a replica at once."""
    room: int = Field(8192, ge=16)
    """Pages of a replica's cache."""
    quick: bool = False
    """Run two small groups on two replicas, without comparing the figures with the goals."""


OPTIONS = RoutingOptions


def run(options: RoutingOptions) -> Result:
    """Measure each load with the router, then by hash. Raises ConfigError for a bad trace."""
    if options.quick:
        small = {"replicas": 2, "groups": 2, "members": 4, "turns": 2, "prompt": 256, "requests": 20}
        options = options.model_copy(update=small)
    loads = {"groups": group_load(options.groups, options.members, options.turns, options.prompt)}
    if options.trace:
        loads["trace"] = trace_load(Path(options.trace), options.requests, options.shrink)
    average, metrics, rows = os.getloadavg()[0], dict[str, float](), list[dict[str, Any]]()
    with _replicas(options) as ports:
        for load, talks in loads.items():
            for router in ("route", "hashing"):
                found = _measured(options, talks, ports, router)
                metrics |= {f"{load}_{router}_{name}": value for name, value in found.items()}
                rows.append({"load": load, "router": router, **found})
    for load, places in {"virtual": [None], "virtual_slow": range(options.replicas)}.items():
        for router in ("route", "hashing"):
            found = _virtual(options, loads["groups"], places, router)
            metrics |= {f"{load}_{router}_{name}": value for name, value in found.items()}
            rows.append({"load": load, "router": router, **found})
    metrics["slow_makespan_ratio"] = metrics["virtual_slow_route_makespan"] / metrics["virtual_slow_hashing_makespan"]
    notes = [
        f"load average at the start: {average:.1f} on {os.cpu_count()} cores, which slows down all of it",
        f"times are real ones, {options.speed:g} times",
        f"{options.replicas} replicas with {options.room} pages of {BLOCK} tokens, {options.slots} sequences at once",
        f"tokens/s: {options.prefill:g} of prompts by a replica, {options.decode:g} sampled by a sequence",
        "computed: prompt tokens that the replicas computed, over those of one cache without end",
        "makespan: over the larger of the work of a replica's share and the longest conversation",
        "imbalance: tokens in flight of the fullest replica over the mean; mean and p99 of samples",
        "virtual: groups, in virtual time; virtual_slow: means over each replica at half speed, makespan over the same"
        " bound as without",
    ]
    return Result(metrics, rows, notes, judged=not options.quick)


def _measured(
    options: RoutingOptions, talks: Sequence[Conversation], ports: Sequence[int], router: str
) -> dict[str, float]:
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    httpx.post(f"{urls[0]}/reset", timeout=_PATIENCE_S).raise_for_status()
    with ExitStack() as stack:
        front = stack.enter_context(_router(urls)) if router == "route" else None
        seconds = asyncio.run(_play(options, talks, urls, front))
    found = httpx.get(f"{urls[0]}/measured", timeout=_PATIENCE_S).json()
    bound = least(talks, options.replicas, options.prefill, options.decode, options.slots)
    return {
        "computed": found["computed"] / bound.computed,
        "makespan": seconds / bound.seconds,
        "imbalance": sum(found["imbalance"]) / max(1, len(found["imbalance"])),
        "imbalance_p99": percentile(found["imbalance"] or [0.0], 99),
    }


def _virtual(
    options: RoutingOptions, talks: Sequence[Conversation], places: Iterable[int | None], router: str
) -> dict[str, float]:
    """Means over the places of a slow replica, or figures without one (None)."""
    machine = Machine(options.prefill, options.decode, options.slots, options.room)
    place = functools.partial(hashed, replicas=options.replicas) if router == "hashing" else None
    found = [play(talks, machine, options.replicas, slow, place) for slow in places]
    return {name: fmean(getattr(each, name) for each in found) for name in Played.__dataclass_fields__}


async def _play(
    options: RoutingOptions, talks: Sequence[Conversation], urls: Sequence[str], front: str | None
) -> float:
    """Simulated seconds until all conversations have ended. front: URL of the router; None: by hash."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # none that a busy server drops as idle
    async with httpx.AsyncClient(timeout=httpx.Timeout(_PATIENCE_S * 10, pool=None), limits=limits) as client:
        began = time.monotonic()

        async def talk(each: Conversation) -> None:
            await asyncio.sleep(max(0.0, began + each.start_s / options.speed - time.monotonic()))
            tokens = list[int]()
            url = front or urls[hashed(each.key, len(urls))]
            headers = {"x-session": each.name, "x-group": each.key} if each.named and front else {}
            for place, turn in enumerate(each.turns):
                tokens += turn.tokens
                body = {
                    "prompt": tokens,
                    "max_tokens": MOST,
                    "sampled": turn.sampled,
                    "conversation": each.name,
                    "turn": place,
                }
                reply = await client.post(f"{url}/v1/completions", json=body, headers=headers)
                if not reply.is_success:
                    raise TriplaneError(f"a request was answered {reply.status_code}: {reply.text[:200]}")
                tokens += reply.json()["choices"][0]["token_ids"]

        async with asyncio.TaskGroup() as tasks:
            for each in talks:
                tasks.create_task(talk(each))
        return (time.monotonic() - began) * options.speed


def hashed(key: str, replicas: int) -> int:
    """Place of a key among the replicas, by rendezvous hash."""
    return max(range(replicas), key=lambda place: hashlib.blake2b(f"{key} {place}".encode()).digest())


@contextmanager
def _replicas(options: RoutingOptions) -> Iterator[list[int]]:
    """Ports of the simulated replicas."""
    ports = _free_ports(options.replicas)
    numbers = (options.speed, options.prefill, options.decode, options.slots, options.room)
    arguments = [",".join(str(port) for port in ports), *(str(number) for number in numbers)]
    with _started([sys.executable, "-m", "benchmarks.routing_replicas", *arguments]) as process:
        _wait(f"http://127.0.0.1:{ports[-1]}/health", process)
        yield ports


@contextmanager
def _router(urls: Sequence[str]) -> Iterator[str]:
    """URL of `python -m inference route` before the replicas."""
    (port,) = _free_ports(1)
    replicas = [part for url in urls for part in ("--replica", url)]
    command = [sys.executable, "-m", "inference", "route", *replicas, "--listen", f"127.0.0.1:{port}"]
    with _started(command) as process:
        _wait(f"http://127.0.0.1:{port}/health", process)
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _started(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            if httpx.get(url, timeout=_PATIENCE_S).is_success:
                return
        except httpx.TransportError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise TriplaneError(f"{url} did not come up: see the messages above")
        time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
