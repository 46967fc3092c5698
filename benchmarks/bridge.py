"""Steps over the bridge: latency, rate and memory of episodes, compared with bare gRPC and with OpenEnv's WebSocket.

    client on the other cores --Connect, Unix socket--> bridge on one core --> an engine that answers at once

Every figure is the median of repeats in fresh servers, the compared sides in turn.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from benchmarks import bridge_load as load
from benchmarks.measure import median, percentile
from benchmarks.result import NotHereError, Options, Result
from benchmarks.turns import Program, program
from contracts.errors import TriplaneError
from contracts.rpc.connecting import prefer_short_round_trips
from inference.bridge.client import BridgeClient

T = TypeVar("T")
ROOT = Path(__file__).parent.parent
EPISODE_TOKENS = 512
"""Tokens of each open episode whose memory is measured."""
_PATIENCE_S = 120.0


class BridgeOptions(Options):
    """Options of the `bridge` benchmark."""

    repeats: int = Field(5, ge=1, le=100)
    """Repetitions of each measurement; results are medians."""
    steps: int = Field(2000, ge=32, le=1_000_000)
    """Steps of a latency measurement; four times as many of a rate."""
    episodes: int = Field(10_000, ge=64, le=50_000)
    """Open episodes whose memory is measured."""
    peers: str = ".venv-peers/bin/python"
    """Python with OpenEnv (make test-peers installs it); empty: measure without."""


OPTIONS = BridgeOptions


def run(options: BridgeOptions) -> Result:
    """Measure all sides in turn. Raises NotHereError without OpenEnv, or with a single core."""
    if options.peers and not Path(options.peers).exists():
        raise NotHereError(f"{options.peers} does not exist: make test-peers installs it; --peers= measures without")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise NotHereError("bridge: this process may use one core: the server needs one of its own, the client another")
    prefer_short_round_trips()
    load_average = os.getloadavg()[0]
    found: dict[str, list[float]] = {}
    with _pinned(set(cores[:-1])):
        for each in _run(_repeated(options, cores[-1])):
            for name, value in each.items():
                found.setdefault(name, []).append(value)
    metrics = {name: median(values) for name, values in found.items()}
    metrics["step_over_echo"] = metrics["step_p50_ms"] / metrics["echo_stream_p50_ms"]
    metrics["step_over_unary_echo"] = metrics["step_p50_ms"] / metrics["echo_unary_p50_ms"]
    if options.peers:
        metrics["times_openenv"] = metrics["steps_per_second"] / metrics["openenv_steps_per_second"]
        metrics["cpu_times_openenv"] = metrics["openenv_cpu_us"] / metrics["cpu_us"]
        metrics["times_openenv_short"] = metrics["steps_per_second"] / metrics["openenv_short_steps_per_second"]
    rows = [_row(name, values) for name, values in found.items()]
    notes = [
        f"load average at the start: {load_average:.1f} on {len(cores)} cores; server on core {cores[-1]}, client on"
        " the others",
        f"steps of {load.TOKENS} tokens; rates with {load.WIDTH} episodes at a time",
        "echo: the bytes of such a step, as a unary call, and on a stream as one message for two, as a step has",
        "openenv: the same ids and logprobs as JSON; openenv short: a message of 5 characters",
    ]
    return Result(metrics, rows, notes, judged=bool(options.peers))


async def _repeated(options: BridgeOptions, core: int) -> list[dict[str, float]]:
    """All measurements, on one event loop: gRPC's polling survives no other."""
    return [await _once(options, core) for _ in range(options.repeats)]


async def _once(options: BridgeOptions, core: int) -> dict[str, float]:
    """One measurement of each side."""
    with _server(core) as (server, folder):
        found = await _measure(server, folder, options.steps)
    with _server(core, "journal") as (server, folder):
        journaled = await _measure(server, folder, options.steps, echo=False)
    found |= {f"journal_{name}": value for name, value in journaled.items()}
    with _server(core) as (server, folder):
        found["kib_per_episode"] = await _memory(server, folder, options.episodes)
    if options.peers:
        found |= _openenv(options, core)
    return found


async def _measure(server: Program, folder: Path, steps: int, echo: bool = True) -> dict[str, float]:
    found: dict[str, float] = {}
    async with BridgeClient(f"unix:{folder / 'bridge.sock'}") as client:
        await load.step_seconds(client, steps // 4)  # warms up
        latencies = await load.step_seconds(client, steps)
        if echo:
            bare = await load.echo_seconds(f"unix:{folder / 'echo.sock'}", steps)
            latencies += await load.step_seconds(client, steps)
            found |= {f"echo_{name}_p50_ms": median(seconds) * 1e3 for name, seconds in bare.items()}
        found |= {"step_p50_ms": median(latencies) * 1e3, "step_p99_ms": percentile(latencies, 99) * 1e3}
        before = await asyncio.to_thread(server.do, "tell")
        rate = await load.steps_per_second(client, 4 * steps)
        after = await asyncio.to_thread(server.do, "tell")
    found["steps_per_second"] = rate.per_second
    found["cpu_us"] = (after["cpu_s"] - before["cpu_s"]) / rate.steps * 1e6
    return found


async def _memory(server: Program, folder: Path, episodes: int) -> float:
    """KiB of a server's memory for each open episode."""
    async with BridgeClient(f"unix:{folder / 'bridge.sock'}") as client:
        await load.hold_open(client, 2 * load.WIDTH, EPISODE_TOKENS)
        before = await asyncio.to_thread(server.do, "tell")
        await load.hold_open(client, episodes, EPISODE_TOKENS)
        after = await asyncio.to_thread(server.do, "tell")
    opened = int(after["open"] - before["open"])
    if opened < episodes:
        raise TriplaneError(f"{opened} of {episodes} episodes are open: run this again")
    return float(after["rss"] - before["rss"]) / opened / 1024


def _openenv(options: BridgeOptions, core: int) -> dict[str, float]:
    """Steps per second of OpenEnv's client and server, with a step's tokens and with a short message."""
    script = str(Path(__file__).with_name("bridge_openenv.py"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # -P: the script's folder has modules of ours that are named like packages that OpenEnv imports
    serve = [options.peers, "-P", script, "serve", str(core), str(load.TOKENS)]
    with program("OpenEnv's server", serve, environment, _PATIENCE_S) as server:
        measure = [options.peers, "-P", script, "measure", str(server.do("tell")["port"]), str(load.WIDTH)]
        found: dict[str, float] = {}
        with program("OpenEnv's client", measure, environment, _PATIENCE_S) as client:
            for name, what in (("openenv", "tokens"), ("openenv_short", "short")):
                before = server.do("tell")["cpu_s"]
                rate = client.do(f"{what} {4 * options.steps}")
                found[f"{name}_steps_per_second"] = rate["per_second"]
                found[f"{name}_cpu_us"] = (server.do("tell")["cpu_s"] - before) / rate["steps"] * 1e6
    return found


@contextmanager
def _server(core: int, *arguments: str) -> Iterator[tuple[Program, Path]]:
    """A server on one core, and the folder with its sockets."""
    with tempfile.TemporaryDirectory(prefix="bench-bridge-") as folder:
        command = [sys.executable, "-m", "benchmarks.bridge_server", folder, str(core), *arguments]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
        with program("the bridge", command, environment, _PATIENCE_S) as server:
            yield server, Path(folder)


@contextmanager
def _pinned(cores: set[int]) -> Iterator[None]:
    """Run this process on some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _row(name: str, values: Sequence[float]) -> dict[str, Any]:
    low, middle, high = (percentile(values, percent) for percent in (25, 50, 75))
    return {"what": name, "median": round(middle, 3), "quartiles": f"{low:.3f} to {high:.3f}", "n": len(values)}


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)
