"""Routing over HTTP: simulated replicas behind `python -m inference route`, other routers, and consistent hashing.

    loads (routing_load) --> router, or a replica by hash --> replicas (routing_replicas) --> what they computed, when

All ways (routing_fronts) get the same requests, in turn, at empty caches. Consistent hashing sends a group, or prompts
that begin alike, to one replica each, and goes without the hop through a router. Groups are also played with a replica
at half speed, and both in virtual time (routing_virtual), where each replica is the slow one once.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from pydantic import Field

from benchmarks.measure import percentile
from benchmarks.result import NotHereError, Options, Result
from benchmarks.routing_fronts import (
    HASHING,
    PATIENCE_S,
    ROUTE,
    Front,
    await_reply,
    free_ports,
    peers,
    running,
    started,
)
from benchmarks.routing_load import BLOCK, MOST, Conversation, group_load, least, text_of, trace_load
from benchmarks.routing_replicas import MODEL, Imbalance, Machine, mean_of
from benchmarks.routing_virtual import Played, play
from contracts.errors import TriplaneError


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
    peers: str = ".venv-peers/bin"
    """Programs of other routers, vllm-router and smg (make test-peers installs them); empty: measure without."""
    quick: bool = False
    """Run two small groups on two replicas, without comparing the figures with the goals."""


OPTIONS = RoutingOptions


def run(options: RoutingOptions) -> Result:
    """Measure each load with each router, in turn. Raises ConfigError for a bad trace, NotHereError without peers."""
    fronts = [ROUTE, HASHING]
    if options.peers:
        if not (Path(options.peers) / "smg").exists():
            raise NotHereError(
                f"{options.peers}/smg does not exist: make test-peers installs it; --peers= goes without"
            )
        fronts += peers(Path(options.peers))
    if options.quick:
        small = {"replicas": 2, "groups": 2, "members": 4, "turns": 2, "prompt": 256, "requests": 20}
        options = options.model_copy(update=small)
    groups = group_load(options.groups, options.members, options.turns, options.prompt)
    loads: dict[str, tuple[list[Conversation], int | None]] = {"groups": (groups, None), "slow": (groups, 0)}
    if options.trace:
        loads["trace"] = trace_load(Path(options.trace), options.requests, options.shrink), None
    average, metrics, rows = os.getloadavg()[0], dict[str, float](), list[dict[str, Any]]()

    def keep(load: str, router: str, found: dict[str, float]) -> None:
        metrics.update({f"{load}_{router}_{name}": value for name, value in found.items()})
        rows.append({"load": load, "router": router, **found})

    with _replicas(options) as ports:
        for load, (talks, slow) in loads.items():
            for front in fronts:
                keep(load, front.name, _measured(options, talks, ports, front, slow))
    for load, places in {"virtual": [None], "virtual_slow": range(options.replicas)}.items():
        for front in (ROUTE, HASHING):
            keep(load, front.name, _virtual(options, groups, places, front))
    for load in ("groups", "slow", "virtual_slow"):
        others = [metrics.get(f"{load}_{front.name}_makespan", math.inf) for front in fronts[1:]]
        metrics[f"{load}_makespan_ratio"] = metrics[f"{load}_route_makespan"] / min(others)
    notes = [
        f"load average at the start: {average:.1f} on {os.cpu_count()} cores, which slows down all of it",
        f"times are real ones, {options.speed:g} times",
        f"{options.replicas} replicas with {options.room} pages of {BLOCK} tokens, {options.slots} sequences at once",
        f"tokens/s: {options.prefill:g} of prompts by a replica, {options.decode:g} sampled by a sequence",
        "computed: prompt tokens that the replicas computed, over those of one cache without end",
        "makespan: over the larger of the work of a replica's share and the longest conversation",
        "imbalance: tokens in flight of the fullest replica over the mean; mean and p99 of samples",
        "imbalance_over_least: the same over its lower bound, the larger of the mean and the largest request",
        "slow: the first replica has half the speed, the bound is that of equal ones",
        "virtual: groups, in virtual time; virtual_slow: means over each replica at half speed",
        "makespan_ratio: that of route over the least of the others",
    ]
    return Result(metrics, rows, notes, judged=bool(options.peers) and not options.quick)


def _measured(
    options: RoutingOptions, talks: Sequence[Conversation], ports: Sequence[int], front: Front, slow: int | None
) -> dict[str, float]:
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    place = {} if slow is None else {"slow": str(slow)}
    httpx.post(f"{urls[0]}/reset", params=place, timeout=PATIENCE_S).raise_for_status()
    with running(front, urls) as url:
        seconds = asyncio.run(_play(options, talks, urls, front, url))
    found = httpx.get(f"{urls[0]}/measured", timeout=PATIENCE_S).json()
    bound = least(talks, options.replicas, options.prefill, options.decode, options.slots)
    samples = [Imbalance(*each) for each in found["imbalance"]]
    mean = mean_of(samples)
    return {
        "computed": found["computed"] / bound.computed,
        "makespan": seconds / bound.seconds,
        "imbalance": mean.over_mean,
        "imbalance_p99": percentile([each.over_mean for each in samples] or [0.0], 99),
        "imbalance_over_least": mean.over_least,
    }


def _virtual(
    options: RoutingOptions, talks: Sequence[Conversation], places: Iterable[int | None], front: Front
) -> dict[str, float]:
    """Means over the places of a slow replica, or figures without one (None)."""
    machine = Machine(options.prefill, options.decode, options.slots, options.room)
    place = functools.partial(hashed, replicas=options.replicas) if front is HASHING else None
    found = [play(talks, machine, options.replicas, slow, place) for slow in places]
    return {name: fmean(getattr(each, name) for each in found) for name in Played.__dataclass_fields__}


async def _play(
    options: RoutingOptions, talks: Sequence[Conversation], urls: Sequence[str], front: Front, url: str | None
) -> float:
    """Simulated seconds until all conversations have ended. url: of the front's router; None: by hash."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)  # none that a busy server drops as idle
    async with httpx.AsyncClient(timeout=httpx.Timeout(PATIENCE_S * 10, pool=None), limits=limits) as client:
        began = time.monotonic()

        async def talk(each: Conversation) -> None:
            await asyncio.sleep(max(0.0, began + each.start_s / options.speed - time.monotonic()))
            prompt = ""
            there = url or urls[hashed(each.key, len(urls))]
            for place, turn in enumerate(each.turns):
                prompt += text_of(turn.tokens)
                about = json.dumps([each.name, place, turn.sampled])
                body = {"model": MODEL, "prompt": prompt, "max_tokens": MOST, "user": about}
                reply = await client.post(f"{there}/v1/completions", json=body, headers=front.headers(each))
                if not reply.is_success:
                    raise TriplaneError(f"{front.name} answered {reply.status_code}: {reply.text[:200]}")
                prompt += reply.json()["choices"][0]["text"]

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
    ports = free_ports(options.replicas)
    numbers = (options.speed, options.prefill, options.decode, options.slots, options.room)
    arguments = [",".join(str(port) for port in ports), *(str(number) for number in numbers)]
    with started([sys.executable, "-m", "benchmarks.routing_replicas", *arguments]) as process:
        await_reply(f"http://127.0.0.1:{ports[-1]}/health", process)
        yield ports
