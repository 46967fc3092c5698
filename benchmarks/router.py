"""The router: microseconds of a choice, compared with Dynamo's hash and radix tree, and events at a bounded memory.

    chains of an index, held by replicas up to some depth --> prompts that share a part of a chain (fresh)
                                                          --> sessions that grow by turns (continuing)

Both sides get the same chains and prompts, in turn. Dynamo's time is that of its two calls from Python: the hashes of a
prompt's blocks, and find_matches. Ours is a whole choice, with the costs of all replicas.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field

from benchmarks.measure import median, percentile
from benchmarks.result import NotHereError, Options, Result
from benchmarks.turns import Program, program
from contracts.errors import TriplaneError
from inference.router import Batch, Namespace, Router, RouterConfig, Stored
from inference.router.router import Decision

SIZE = 16
"""Tokens of a block."""
TURN = 256
"""Tokens that each turn of a session adds."""
_VOCABULARY = 150_000
_SHARED = 2048
"""Tokens of the system prompt, with which all chains begin."""
_HOLDERS = 4
"""Replicas that hold a part of each chain."""
_FLYING = 256
"""Requests in flight."""
_PATIENCE_S = 600.0


class RouterOptions(Options):
    """Options of the `router` benchmark."""

    repeats: int = Field(5, ge=1, le=100)
    """Repetitions of each measurement; results are medians."""
    tokens: int = Field(32_768, ge=4096, le=1 << 20)
    """Tokens of a prompt."""
    replicas: int = Field(64, ge=1, le=1024)
    """Replicas to choose from."""
    blocks: int = Field(1_000_000, ge=10_000, le=100_000_000)
    """Blocks of the index."""
    prompts: int = Field(128, ge=8, le=10_000)
    """Fresh prompts, and turns of sessions, in each repetition."""
    events: int = Field(10_000_000, ge=1000, le=1_000_000_000)
    """Blocks to store and remove once the index is full."""
    quick: bool = False
    """Run with 1% of the blocks and events, and judge no goals."""
    peers: str = ".venv-peers/bin/python"
    """Python with ai-dynamo-runtime (make test-peers installs it); empty: measure without."""


OPTIONS = RouterOptions


class Load(NamedTuple):
    """Input of both routers."""

    chains: npt.NDArray[np.int32]
    """[chains, tokens]"""
    holders: list[list[tuple[int, int]]]
    """Of each chain: (replica, blocks that it holds)."""
    prompts: npt.NDArray[np.int32]
    """[repeats * prompts, tokens]"""


def run(options: RouterOptions) -> Result:
    """Measure both sides in turn, then events. Raises NotHereError without the peer."""
    if options.peers and not Path(options.peers).exists():
        raise NotHereError(f"{options.peers} does not exist: make test-peers installs it; --peers= measures without")
    if options.quick:
        small = {"blocks": options.blocks // 100, "events": options.events // 100, "repeats": 1, "prompts": 16}
        options = options.model_copy(update=small)
    load_average = os.getloadavg()[0]
    load = make_load(options)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-router-") as scratch, _peer(options, load, Path(scratch)) as peer:
        router, blocks = _filled(options, load)
        sessions = _sessions(options, load)
        for repeat in range(options.repeats):
            rounds = slice(repeat * options.prompts, (repeat + 1) * options.prompts)
            each = _fresh(router, load.prompts[rounds]) | _continuing(router, sessions, options.prompts)
            if peer is not None:
                each |= peer.do(f"{rounds.start} {rounds.stop}")
            for name, value in each.items():
                found.setdefault(name, []).append(value)
    metrics = {name: median(values) for name, values in found.items()} | _events(options)
    if options.peers:
        theirs = metrics["dynamo_hash_p50_us"] + metrics["dynamo_find_p50_us"]
        metrics["times_dynamo"] = theirs / metrics["fresh_p50_us"]
        metrics["times_dynamo_from_list"] = theirs / metrics["fresh_list_p50_us"]
    rows = [{"measured": name, "median": value, "all": found.get(name, [value])} for name, value in metrics.items()]
    notes = [
        f"load average at the start: {load_average:.1f} on {os.cpu_count()} cores",
        f"{options.tokens:,} tokens, {options.replicas} replicas, {blocks:,} blocks of {SIZE} tokens at the start",
        "fresh: a prompt as an int32 array that shares a part of a cached chain; fresh_list: the same as a list of"
        f" ints, as Dynamo is given it; continuing: a session that has {TURN} tokens more than before",
        "record: Router.begin, after the choice: load, session and assumed blocks; fresh_between_records: choices that"
        " find the processor's caches full of the record before",
        "requests per second: of choose and begin together, in one process",
        "events: blocks stored and removed, by all replicas, at an index that is full; memory is that of the process",
    ]
    return Result(metrics, rows, notes, judged=bool(options.peers) and not options.quick)


def make_load(options: RouterOptions) -> Load:
    """Chains, holders and prompts, the same for the same options."""
    drawn = np.random.default_rng(16)
    width = options.tokens // SIZE * SIZE
    count = max(1, (options.blocks * SIZE - _SHARED) // (width - _SHARED))
    chains = drawn.integers(0, _VOCABULARY, (count, width), np.int32)
    chains[:, :_SHARED] = chains[0, :_SHARED]
    holders = []
    for _ in range(count):
        places = drawn.choice(options.replicas, min(_HOLDERS, options.replicas), replace=False).tolist()
        depths = [width // SIZE, *drawn.integers(_SHARED // SIZE, width // SIZE, len(places) - 1).tolist()]
        holders.append(list(zip(places, depths, strict=True)))
    prompts = drawn.integers(0, _VOCABULARY, (options.repeats * options.prompts, options.tokens), np.int32)
    for prompt in prompts:
        shared = int(drawn.integers(_SHARED, width))
        prompt[:shared] = chains[drawn.integers(count), :shared]
    return Load(chains, holders, prompts)


def _filled(options: RouterOptions, load: Load) -> tuple[Router, int]:
    """A router that knows the chains by events, and its number of blocks."""
    router = Router(Namespace("policy"), RouterConfig(block_tokens=SIZE, blocks=options.blocks * 5 // 4))
    for place in range(options.replicas):
        router.add(str(place))
    sequence = [0] * options.replicas
    for number, (chain, holders) in enumerate(zip(load.chains, load.holders, strict=True)):
        names = [(number, block) for block in range(len(chain) // SIZE)]
        for place, depth in holders:
            router.apply(str(place), Batch(sequence[place], [Stored(names[:depth], None, chain[: depth * SIZE], SIZE)]))
            sequence[place] += 1
    return router, len(router.index)


class _Clocked:
    """Measures Router.choose and Router.begin while `_FLYING` requests are in flight."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._flying: deque[Decision] = deque()
        self.choose: list[float] = []
        self.record: list[float] = []

    def choice(self, prompt: Any, session: str | None = None) -> Decision:
        """Choose."""
        begin = time.perf_counter()
        decision = self._router.choose(prompt, max_tokens=256, session=session)
        self.choose.append((time.perf_counter() - begin) * 1e6)
        return decision

    def send(self, prompt: Any, session: str | None = None) -> None:
        """Choose, and begin."""
        decision = self.choice(prompt, session)
        begin = time.perf_counter()
        self._router.begin(decision)
        self.record.append((time.perf_counter() - begin) * 1e6)
        self._flying.append(decision)
        if len(self._flying) > _FLYING:
            self._finish(self._flying.popleft())

    def _finish(self, decision: Decision) -> None:
        """Answer a request at the rates assumed at first."""
        self._router.finish(decision, seconds=(decision.prompt - decision.cached) * 1e-4 + 256 * 2e-2, sampled=256)

    def rate(self, skip: int = 0) -> float:
        """Requests per second that one process chooses and begins, without the first `skip`."""
        return 1e6 * len(self.record[skip:]) / (sum(self.choose[skip:]) + sum(self.record[skip:]))

    def close(self) -> None:
        """Finish what is in flight."""
        while self._flying:
            self._finish(self._flying.popleft())


def _fresh(router: Router, prompts: npt.NDArray[np.int32]) -> dict[str, float]:
    clocked, listed, busy = _Clocked(router), _Clocked(router), _Clocked(router)
    for place in range(_FLYING):
        busy.send(prompts[place % len(prompts), : _SHARED + 16 * place])
    for prompt in prompts:
        clocked.choice(np.array(prompt.tolist(), np.int32))  # a new array, as Dynamo is given a new list
    for prompt in prompts:
        listed.choice(prompt.tolist())
    for prompt in prompts:
        busy.send(prompt)
    busy.close()
    return {
        "fresh_p50_us": median(clocked.choose),
        "fresh_p99_us": percentile(clocked.choose, 99),
        "fresh_list_p50_us": median(listed.choose),
        "fresh_record_p50_us": median(busy.record[_FLYING:]),
        "fresh_between_records_p50_us": median(busy.choose[_FLYING:]),
        "fresh_requests_per_second": busy.rate(_FLYING),
    }


def _sessions(options: RouterOptions, load: Load) -> Iterator[tuple[str, npt.NDArray[np.int32]]]:
    """Endless (session, prompt) pairs, the sessions in turn; a session's first prompt has full length."""
    drawn = np.random.default_rng(17)
    prompts = {str(place): load.prompts[place] for place in range(min(64, len(load.prompts)))}
    while True:
        for name in prompts:
            yield name, prompts[name]
            more = drawn.integers(0, _VOCABULARY, TURN, np.int32)
            prompts[name] = np.concatenate((prompts[name], more))


def _continuing(router: Router, sessions: Iterator[tuple[str, npt.NDArray[np.int32]]], turns: int) -> dict[str, float]:
    clocked = _Clocked(router)
    for _ in range(64):  # first turns, or turns that the other measurement has made cold
        name, prompt = next(sessions)
        clocked.send(prompt, name)
    clocked.choose.clear()
    clocked.record.clear()
    for _ in range(turns):
        name, prompt = next(sessions)
        clocked.send(prompt, name)
    clocked.close()
    return {
        "continuing_p50_us": median(clocked.choose),
        "continuing_p99_us": percentile(clocked.choose, 99),
        "continuing_record_p50_us": median(clocked.record),
        "continuing_requests_per_second": clocked.rate(),
    }


@contextmanager
def _peer(options: RouterOptions, load: Load, scratch: Path) -> Iterator[Program | None]:
    """A process with the same chains in Dynamo's radix tree; None if `options.peers` is empty."""
    if not options.peers:
        yield None
        return
    np.save(scratch / "chains.npy", load.chains)
    np.save(scratch / "prompts.npy", load.prompts)
    (scratch / "holders.json").write_text(json.dumps(load.holders))
    script = str(Path(__file__).with_name("router_dynamo.py"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [options.peers, "-P", script, str(scratch), str(SIZE)]
    with program("dynamo", command, environment, _PATIENCE_S) as running:
        yield running


def _events(options: RouterOptions) -> dict[str, float]:
    """Events at a full index, in a process of their own."""
    command = [sys.executable, "-m", "benchmarks.router_events", str(options.events), str(options.blocks)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TriplaneError(f"applying events failed: {(done.stderr.splitlines() or ['no message'])[-1]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found
