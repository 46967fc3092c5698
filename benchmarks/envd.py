"""Sandboxes over gRPC, compared with other programs that run commands in sandboxes: bubblewrap, runc, runsc, SWE-ReX's
local runtime.

A sandbox counts as created when its first exec has returned. The server, its sandboxes and the measuring clients share
the machine's cores. Peers are measured in the same run, one after the other, with no other load of the benchmark.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import Field

from benchmarks import envd_load as load
from benchmarks.envd_peers import Peer, peers_here
from benchmarks.envd_swerex import measure_swerex
from benchmarks.measure import median, percentile, seconds_of
from benchmarks.result import Options, Result
from contracts.rpc.connecting import prefer_short_round_trips
from envd.local import TRUSTED, LocalEnvd
from envd.operations.client import OperationsClient

T = TypeVar("T")
_THREADS = 2


class EnvdOptions(Options):
    """Options of the `envd` benchmark."""

    repeats: int = Field(500, ge=5, le=100_000)
    """Measurements of each call; a fifth as many of verifications."""
    pool: int = Field(32, ge=0, le=1000)
    """Size of the server's pool; the burst creates ten times as many sandboxes, at least 100."""
    idle: int = Field(2000, ge=1, le=20_000)
    """Number of sandboxes held at once."""
    seconds: float = Field(10, gt=0, le=600)
    """Duration of the create-and-destroy measurement, in seconds."""
    peers: str = "bubblewrap runc runsc swerex"
    """Peers to compare with, separated by blanks."""
    peer_repeats: int = Field(30, ge=2, le=1000)
    """Measurements of each operation per peer."""


OPTIONS = EnvdOptions


def run(options: EnvdOptions) -> Result:
    """Measure a server started here, then the peers."""
    prefer_short_round_trips()
    notes = [
        f"load average at the start: {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores, which the"
        " clients use too"
    ]
    with LocalEnvd(log_level="error", rules=TRUSTED, options=["--pool", str(options.pool)]) as server:
        timings, metrics = _run(_measure(server.address, options, notes))
    rows = [_row("envd", timings, metrics["cycles_per_second"])]
    for name, seconds in timings.items():
        metrics |= {f"{name}_p50_ms": median(seconds) * 1e3, f"{name}_p99_ms": percentile(seconds, 99) * 1e3}
    for name, found, per_second in _peers(options, notes):
        rows.append(_row(name, found, per_second))
        for operation in ("create", "exec"):
            metrics[f"{name}_{operation}_p50_ms"] = median(found[operation]) * 1e3
            metrics[f"{operation}_times_faster_than_{name}"] = median(found[operation]) / median(timings[operation])
    return Result(metrics, rows, notes)


async def _measure(address: str, options: EnvdOptions, notes: list[str]) -> tuple[load.Timings, dict[str, float]]:
    async with OperationsClient(address) as client:
        info = await client.info()
        notes.append(f"backend {info.backend}, started by {info.backends[0].helper}; pool {options.pool}")
        timings = await load.burst(client, max(100, 10 * options.pool))
        timings |= await load.calls(client, options.repeats)
        timings["verify"] = await load.verifications(client, max(5, options.repeats // 5))
        metrics = {"cycles_per_second": await load.cycles_per_second(address, options.seconds)}
        idle = await load.hold_idle(client, options.idle)
    return timings, metrics | {
        "idle_held": float(idle.held),
        "idle_mb_of_machine": idle.mb_of_machine,
        "idle_mb_of_groups": idle.mb_of_groups,
        "idle_created_per_second": options.idle / idle.seconds,
    }


def _peers(options: EnvdOptions, notes: list[str]) -> list[tuple[str, load.Timings, float]]:
    names = options.peers.split()
    found = []
    with peers_here([name for name in names if name != "swerex"], notes) as peers:
        for peer in peers:
            timings = _time_peer(peer, options.peer_repeats)
            found.append((peer.name, timings, _peer_cycles(peer, options.peer_repeats)))
    if "swerex" in names and (timings := measure_swerex(options.peer_repeats, options.peer_repeats, notes)):
        found.append(("swerex", timings, len(timings["cycle"]) / sum(timings["cycle"])))
        notes.append("swerex isolates nothing: a bash session on this machine; its cycles run one at a time")
    return found


def _time_peer(peer: Peer, repeats: int) -> load.Timings:
    timings: load.Timings = {"create": []}
    for number in range(repeats):
        begin = time.perf_counter()
        box = peer.create()
        try:
            box.execute()
            timings["create"].append(time.perf_counter() - begin)
            if number == repeats - 1:
                timings["exec"] = seconds_of(box.execute, repeats=repeats)
                timings["read"] = seconds_of(box.read, repeats=repeats)
        finally:
            box.destroy()
    return timings


def _peer_cycles(peer: Peer, repeats: int) -> float:
    """Sandboxes created and destroyed per second, with as many threads as the goals' reference machine has cores."""

    def work() -> None:
        for _ in range(max(1, repeats // _THREADS)):
            peer.create().destroy()

    threads = [threading.Thread(target=work) for _ in range(_THREADS)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _THREADS * max(1, repeats // _THREADS) / (time.perf_counter() - begin)


def _row(name: str, timings: Mapping[str, Sequence[float]], per_second: float) -> dict[str, Any]:
    return {
        "sandbox": name,
        "create p50 ms": median(timings["create"]) * 1e3,
        "create p99 ms": percentile(timings["create"], 99) * 1e3,
        "exec p50 ms": median(timings["exec"]) * 1e3,
        "read p50 ms": median(timings["read"]) * 1e3,
        "created and destroyed /s": per_second,
        "n": len(timings["create"]),
    }


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop if it is installed, as the server does."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)
