"""Events of the `router` benchmark: `python -m benchmarks.router_events EVENTS BLOCKS` prints rate and memory as JSON.

64 replicas, which together hold a quarter more blocks than the index, store chains of four turns and drop the oldest
blocks. Only calls of the router count as time.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque

import numpy as np

from benchmarks.measure import resident
from inference.router import Batch, Namespace, Removed, Router, RouterConfig, Stored

_REPLICAS, _SIZE, _TURN, _TURNS = 64, 16, 32, 4
"""Replicas, tokens of a block, blocks of a turn, turns of a chain."""


def _main(events: int, blocks: int) -> None:
    router = Router(Namespace("policy"), RouterConfig(block_tokens=_SIZE, blocks=blocks))
    room = blocks * 5 // 4 // _REPLICAS
    held: list[deque[int]] = [deque() for _ in range(_REPLICAS)]
    for place in range(_REPLICAS):
        router.add(str(place))
    drawn, done, number, sequence = np.random.default_rng(3), 0, 0, 0
    seconds, at_cap, most = 0.0, 0, 0
    while done < events:
        for place in range(_REPLICAS):
            changes: list[Stored | Removed] = []
            tokens = drawn.integers(0, 150_000, _TURN * _SIZE, np.int32)
            parent = number - _REPLICAS * _TURN if sequence % _TURNS else None
            names = list(range(number, number + _TURN))
            before = None if parent is None else parent + _TURN - 1
            changes.append(Stored(names, before, tokens, _SIZE))
            number += _TURN
            held[place].extend(names)
            if len(held[place]) > room:
                changes.append(Removed([held[place].popleft() for _ in range(_TURN)]))
            batch = Batch(sequence, changes)
            begin = time.perf_counter()
            router.apply(str(place), batch)
            seconds += time.perf_counter() - begin
            done += _TURN * len(changes)
        sequence += 1
        if number > 2 * blocks or done >= events // 2:  # full, and every replica drops blocks
            now = resident("VmRSS")
            at_cap, most = at_cap or now, max(most, now)
    counters = router.residency.counters
    answer = {
        "events_per_second": done / seconds,
        "memory_growth": most / at_cap,
        "memory_mib": most / 2**20,
        "index_blocks": len(router.index),
        "index_evicted": router.index.evicted,
        "orphans_share": counters.orphans / done,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]))
