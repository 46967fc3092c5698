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
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from inference.router.score import Columns

BOUND = 1.25
"""Largest load of a replica, as a multiple of the mean, before a request is added."""
FEW, SPREAD = 32, 2.0
"""Requests in flight, and multiple of their mean, up to which a replica with a part of the prompt accepts another one.
Not their tokens: short first turns would leave a replica because of the long later turns there.
"""
Level = tuple[int, int]
"""Cached tokens, and the set of replicas that have just so many, each as its first holder."""
ALONE = 4
"""Replicas, at most, that are looked at one by one."""
_MIX = [np.array(each, np.uint64) for each in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]
_SHIFTS = [np.array(each, np.uint64) for each in (30, 27, 31)]


def choose(
    columns: Columns, prompt: int, output: int, levels: Iterator[Level], group: int, stay: int
) -> tuple[int, float, int]:
    """Place of the chosen replica, its cost in seconds and its cached tokens; at least one must serve.

    prompt, output: tokens. levels: of `cached_levels`. group: 64-bit hash. stay: place of the session's replica, or -1.
    """
    mean = (columns.total + max(1, prompt + output)) / columns.count
    first = next(levels, (0, 0))
    uniform = first[1].bit_count() in (0, columns.count)
    if not uniform:
        second = next(levels, (0, 0))
        good, cost = _first(columns, prompt, output, first, second[0], BOUND * mean)
        if good:
            return _one(columns, good, group, stay), cost, first[0]
        levels = itertools.chain((second,), levels)
    cached = np.zeros(len(columns.tokens))
    for tokens, places in itertools.chain((first,), levels):
        cached[_places(places)] = tokens
    costs = columns.costs(prompt, output, cached)
    full = columns.tokens >= (mean if uniform else BOUND * mean)
    if not uniform:
        full &= (cached == 0) | (columns.requests >= _few(columns))
    np.copyto(costs, np.inf, where=full)
    best = int(costs.argmin())
    slack = (prompt - cached.item(best)) * columns.rates.prefill_s if uniform else 0.0
    best = _one(columns, (costs <= costs.item(best) + slack).nonzero()[0].tolist(), group, stay)
    return best, costs.item(best), int(cached.item(best))


def _first(
    columns: Columns, prompt: int, output: int, level: Level, others: int, bound: float
) -> tuple[list[int], float]:
    """Replicas of least cost and this cost, if they are a few of `level`, and others can't cost so little; else none.

    level: with most of the prompt. others: most tokens that others have cached. Saves looking at all replicas.
    """
    cached, places = level
    good: list[int] = []
    least = columns.least(prompt, output, others)
    if places.bit_count() > ALONE:
        return good, least
    while places:
        place = places.bit_length() >> 1
        places ^= 1 << 2 * place
        if columns.tokens.item(place) < bound or columns.requests.item(place) < _few(columns):
            cost = columns.cost(place, prompt, output, cached)
            if cost < least:
                good, least = [place], cost
            elif cost == least and good:
                good.append(place)
    return good, least


def _few(columns: Columns) -> float:
    return max(FEW, SPREAD * (columns.all_requests + 1) / columns.count)


def _one(columns: Columns, good: list[int], group: int, stay: int) -> int:
    """One of equally good replicas."""
    if stay in good:
        return stay
    return good[rendezvous(columns.names[good], group).argmax()] if len(good) > 1 else good[0]


def rendezvous(names: npt.NDArray[np.uint64], group: int) -> npt.NDArray[np.uint64]:
    """[replicas] weights of a group at each replica: well mixed bits of both (the finalizer of splitmix64)."""
    mixed = names ^ np.uint64(group)
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _MIX[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _MIX[1]
    mixed ^= mixed >> _SHIFTS[2]
    return mixed


def cached_levels(depths: Sequence[tuple[int, int]], even: int, block_tokens: int) -> Iterator[Level]:
    """Cached tokens of the replicas, most first: the most counts of what their events say and what is assumed.

    depths: of a prompt, see PrefixIndex.depths. even: the first holders of all replicas.
    """
    for depth, holders in depths:
        if places := (holders | holders >> 1) & even:
            yield depth * block_tokens, places
            even ^= places


@functools.lru_cache(4096)
def _places(evens: int) -> npt.NDArray[np.intp]:
    """Places of replicas, from a set of their first holders."""
    return np.array([place for place in range(evens.bit_length() + 1 >> 1) if evens >> 2 * place & 1], np.intp)
