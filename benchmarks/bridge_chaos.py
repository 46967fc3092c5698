"""Episodes under faults: cut and delayed connections, killed bridges, lost engines, killed clients, stray calls.

    undisturbed run --> digests of all episodes
    the same episodes, while faults are dealt --> the same digests, each tool call executed once, and nothing left over

Of each eight episodes one is hosted: the bridge executes its calls in a real sandbox and grades it. Episodes are let in
as faults are dealt, so that all faults meet episodes.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks.bridge_chaos_hosted import CALLS
from benchmarks.bridge_chaos_lab import CLIENTS, Lab
from benchmarks.bridge_chaos_play import Seen, digest_of, is_hosted
from benchmarks.bridge_chaos_server import LEASE_S
from benchmarks.result import Options, Result
from envd.local import LocalEnvd

FAULTS = {"cut": 48, "delay": 4, "stray call": 38, "engine lost": 4, "bridge killed": 4, "client killed": 2}
"""Kinds of faults and their weights."""
_AHEAD = 64
"""Episodes started before the first fault."""
_PAUSE_S = 0.02
"""Mean time between two faults."""
_DELAY_S = 0.3
_PATIENCE_S = 600.0


class BridgeChaosOptions(Options):
    """Options of the `bridge-chaos` benchmark."""

    episodes: int = Field(2000, ge=8, le=1_000_000)
    """Episodes to play."""
    faults: int = Field(1000, ge=1, le=1_000_000)
    """Faults to deal."""
    seed: int = 0
    """Of the order of faults."""


OPTIONS = BridgeChaosOptions


def run(options: BridgeChaosOptions) -> Result:
    """Play the episodes undisturbed and under faults, and compare."""
    with LocalEnvd(log_level="error") as envd:
        return asyncio.run(_run(options, envd.address))


async def _run(options: BridgeChaosOptions, envd: str) -> Result:
    with tempfile.TemporaryDirectory(prefix="bridge-chaos-") as scratch:
        folder = Path(scratch)
        begin = time.perf_counter()
        expected, _ = await _played(folder / "undisturbed", envd, options, [])
        middle = time.perf_counter()
        found, dealt = await _played(folder / "disturbed", envd, options, _faults(options))
        end = time.perf_counter()
        processes = _processes(scratch)
        sockets = [path for path in folder.rglob("*") if path.is_socket()]
    digests = {number: digest for number, digest in found["digests"].items() if digest == expected["digests"][number]}
    metrics = {
        "episodes_missing": float(options.episodes - len(found["digests"])),
        "faults_missing": float(options.faults - dealt.total()),
        "transcripts_changed": float(len(found["digests"]) - len(digests)),
        "tokens_changed": float(found["changed"]),
        "hosted": float(len(found["executed"])),
        "executions_missing": float(sum(max(0, CALLS - len(each)) for each in found["executed"])),
        "executed_twice": float(sum(times - 1 for each in found["executed"] for times in each.values())),
        "calls_wrong": float(len(found["wrong"])),
        "calls_answered": float(found["answered"]),
        "episodes_left": float(found["left"]),
        "sandboxes_left": float(found["sandboxes"]),
        "processes_left": float(len(processes)),
        "sockets_left": float(len(sockets)),
        "tokens_seen": float(found["tokens"]),
        "connections": float(found["connections"]),
        "undisturbed_seconds": middle - begin,
        "disturbed_seconds": end - middle,
    }
    rows = [{"fault": kind, "dealt": dealt[kind]} for kind in FAULTS]
    return Result(metrics, rows, [*found["wrong"][:5], *processes[:5]])


def _faults(options: BridgeChaosOptions) -> list[str]:
    """Kinds of all faults in order: each kind at least once where there is room."""
    drawn = random.Random(options.seed)
    kinds = list(FAULTS)[: options.faults]
    kinds += drawn.choices(list(FAULTS), list(FAULTS.values()), k=options.faults - len(kinds))
    drawn.shuffle(kinds)
    return kinds


async def _played(
    folder: Path, envd: str, options: BridgeChaosOptions, faults: list[str]
) -> tuple[dict[str, Any], Counter[str]]:
    """Play all episodes while faults are dealt, and return what is there afterwards and the faults by kind."""
    folder.mkdir()
    lab, dealt = Lab(folder, secrets.token_hex(4), envd), Counter[str]()
    await lab.start()
    try:
        for number, kind in enumerate(faults):
            lab.allow(min(options.episodes, _AHEAD + options.episodes * number // len(faults)))
            await _deal(lab, kind)
            dealt[kind] += 1
            await asyncio.sleep(random.expovariate(1 / _PAUSE_S))
        lab.allow(options.episodes)
        await lab.wait_done(options.episodes, _PATIENCE_S)
        await lab.finish()
        if faults:
            await lab.abandon(_AHEAD)
        left = await _left(lab.open_episodes)
        sandboxes = await _left(lab.sandboxes)
        await lab.end()
    finally:
        await lab.stop()
    return _result(lab) | {"left": left, "sandboxes": sandboxes}, dealt


async def _deal(lab: Lab, kind: str) -> None:
    if kind == "cut":
        lab.proxy.cut()
    elif kind == "delay":
        lab.proxy.hold()
        await asyncio.sleep(random.uniform(0, _DELAY_S))
        lab.proxy.let_go()
    elif kind == "stray call":
        random.choice(lab.clients).tell("call")
    elif kind == "engine lost":
        lab.lose_engine()
    elif kind == "bridge killed":
        await lab.kill_bridge()
    else:
        await lab.kill_client(random.randrange(CLIENTS))


async def _left(count: Callable[[], Awaitable[int]]) -> int:
    """Episodes, or sandboxes, that are there after all leases have ended."""
    deadline = time.monotonic() + LEASE_S + 5
    while (left := await count()) and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
    return left


def _result(lab: Lab) -> dict[str, Any]:
    digests: dict[int, str] = {}
    executed: list[Mapping[str, int]] = []
    changed = tokens = 0
    for part in range(CLIENTS):
        seen = Seen(lab.log_of(part))
        digests |= {number: digest_of(number, seen.turns[number]) for number in seen.done}
        executed += [each for number, each in seen.done.items() if is_hosted(number) and each is not None]
        changed += seen.changed()
        tokens += sum(len(turn.token_ids) for turns in seen.turns.values() for turn in turns)
    return {
        "digests": digests,
        "executed": executed,
        "changed": changed,
        "tokens": tokens,
        "wrong": lab.wrong,
        "answered": lab.answered,
        "connections": lab.proxy.accepted,
    }


def _processes(folder: str) -> list[str]:
    """Command lines of processes that work in a folder."""
    found = []
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit() or int(directory.name) == os.getpid():
            continue
        try:
            command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if folder in command:
            found.append(command)
    return found
