"""Choice of a replica: the least cost among those whose load is bounded.

Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018): no replica whose tokens in flight have
reached BOUND times the mean, the new request included, gets another one, unless it has a part of the prompt that others
lack and less than FEW requests, or SPREAD times the mean of those. Where none has more of it than another, the bound is
the mean itself, so that groups fill all replicas. At least one replica is below, always.

Where no replica has more of the prompt than another, those are equally good whose cost exceeds the least one by no more
than computing the prompt costs: that is what a sibling saves by going to the same one. Of equally good ones the
session's own replica wins, else the first by rendezvous hash of the group, so that siblings meet without shared state.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from inference.router.score import Column, Columns

BOUND = 1.25
"""Largest load of a replica, as a multiple of the mean, before a request is added."""
FEW, SPREAD = 32, 2.0
"""Requests in flight, and multiple of their mean, up to which a replica with a part of the prompt accepts another one.
Not their tokens: short first turns would leave a replica because of the long later turns there.
"""
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


def choose(
    columns: Columns, prompt: int, output: int, cached: Column, uniform: bool, group: int, stay: int
) -> tuple[int, float]:
    """Place and cost in seconds of the chosen replica; at least one must serve.

    prompt, output: tokens. cached: [places] tokens. uniform: no serving replica has cached more than another. group:
    64-bit hash. stay: place of the session's replica, or -1.
    """
    costs = columns.costs(prompt, output, cached)
    mean = (columns.total + max(1, prompt + output)) / columns.count
    full = columns.tokens >= (mean if uniform else BOUND * mean)
    if not uniform:
        few = max(FEW, SPREAD * (columns.all_requests + 1) / columns.count)
        full &= (cached == 0) | (columns.requests >= few)
    costs[full] = np.inf
    best = int(costs.argmin())
    least = costs.item(best)
    slack = (prompt - cached.item(best)) * columns.rates.prefill_s if uniform else 0.0
    if stay >= 0 and costs.item(stay) <= least + slack:
        best = stay
    elif len(good := (costs <= least + slack).nonzero()[0]) > 1:
        best = int(good[rendezvous(columns.names[good], group).argmax()])
    return best, costs.item(best)


def rendezvous(names: npt.NDArray[np.uint64], group: int) -> npt.NDArray[np.uint64]:
    """[replicas] weights of a group at each replica: well mixed bits of both (the finalizer of splitmix64)."""
    mixed = names ^ np.uint64(group)
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _MIX[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _MIX[1]
    mixed ^= mixed >> _SHIFTS[2]
    return mixed


def cached_tokens(depths: Sequence[tuple[int, int]], columns: Columns, block_tokens: int) -> tuple[Column, bool]:
    """[places] cached tokens of each replica, and whether no replica has more than another.

    The most counts of what a replica's events say and what is assumed.
    """
    cached, left = np.zeros(len(columns.tokens)), 0
    for _, holders in depths:
        left |= holders
    most = 0
    for depth, holders in depths:  # those deeper are set again: their sets are seen more often than those ending here
        places = _places((left | left >> 1) & columns.even)
        cached[places] = depth * block_tokens
        most = len(places)
        left &= ~holders
    return cached, most in (0, columns.count)


@functools.lru_cache(4096)
def _places(evens: int) -> npt.NDArray[np.intp]:
    """Places of replicas, from a set of their first holders."""
    return np.array([place for place in range(evens.bit_length() + 1 >> 1) if evens >> 2 * place & 1], np.intp)
