"""Costs of replicas, in seconds, as columns with one place for each replica.

    cost = slowness ((OWN (prompt - cached) + computing + displaced) prefill_s + output decode_s)

computing: prompt tokens of requests in flight that were not cached. displaced: cached tokens of open sessions that the
replica must drop to make room. The seconds for a token computed and for one sampled are learned from all answers, and
from its own how much slower than those a replica is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

PREFILL_S, DECODE_S = 1e-4, 2e-2
"""Rates before anything was learned."""
OWN = 4.0
"""Weight of a token that the request computes: those that come after it wait, too. Without it a group would spread as
soon as computing its prompt again took no longer than waiting for it.
"""
_DECAY = 0.98
_PRIOR_TOKENS = 64.0
"""Weight of the first guess of a rate, as if so many tokens had been measured."""
_PRIOR_ANSWERS = 4.0
"""Weight of the guess that a replica is as fast as the others."""
_NOISE = 0.2
"""Slowness of a replica, beyond that of the others, that is taken for chance: it would move sessions for nothing."""

Column = npt.NDArray[np.float64]
T = TypeVar("T", float, Column)


class InFlight(NamedTuple):
    """Requests in flight at one replica."""

    requests: int = 0
    tokens: int = 0
    """Of prompts and expected outputs."""
    computing: int = 0
    """Prompt tokens that were not cached."""


class Rates:
    """Seconds for a computed and for a sampled token: least squares over answers, older ones count less."""

    def __init__(self) -> None:
        self.prefill_s, self.decode_s = PREFILL_S, DECODE_S
        self._products, self._results = np.zeros((2, 2)), np.zeros(2)

    def expected(self, computed: int, sampled: int) -> float:
        """Seconds of an answer of `computed` prompt tokens, its own and those ahead of it, and `sampled` ones."""
        return computed * self.prefill_s + sampled * self.decode_s

    def learn(self, computed: int, sampled: int, seconds: float) -> None:
        """An answer took `seconds`. See `expected`."""
        counts, prior = np.array([computed, sampled], float), np.array([PREFILL_S, DECODE_S])
        self._products = _DECAY * self._products + np.outer(counts, counts)
        self._results = _DECAY * self._results + counts * seconds
        weight = np.eye(2) * _PRIOR_TOKENS**2
        products, results = self._products + weight, self._results + weight @ prior
        found = np.linalg.solve(products, results)
        if (found <= 0).any():  # the two can't be told apart: both guesses are scaled alike
            found = prior * (results @ prior) / (prior @ products @ prior)
        self.prefill_s, self.decode_s = found.tolist()


class Slowness:
    """Seconds that a replica's answers take, as a multiple of those expected from all replicas."""

    def __init__(self) -> None:
        self._seconds = self._expected = 0.0
        self.value = 1.0

    def learn(self, expected: float, seconds: float) -> None:
        """An answer took `seconds` instead of `expected`."""
        self._seconds = _DECAY * self._seconds + seconds
        self._expected = _DECAY * self._expected + expected
        prior = _PRIOR_ANSWERS * expected
        if prior:
            found = (prior + self._seconds) / (prior + self._expected)
            self.value = 1.0 if abs(found - 1) < _NOISE else found


class Columns:
    """State of all replicas; place i of each column belongs to one replica, or is free."""

    def __init__(self) -> None:
        self.rates = Rates()
        self.slowness: Column = np.zeros(0)
        self.requests: Column = np.zeros(0)
        """In flight; infinite at free places, as their tokens."""
        self.tokens: Column = np.zeros(0)
        """Of the requests in flight: prompt and expected output."""
        self.computing: Column = np.zeros(0)
        self.resident: Column = np.zeros(0)
        """Tokens of open sessions."""
        self.room: Column = np.zeros(0)
        """Tokens that the cache holds; infinite: unknown."""
        self.names = np.zeros(0, np.uint64)
        """Hashes of the replicas' names."""
        self.total = 0.0
        """Tokens in flight everywhere."""
        self.all_requests = 0.0
        """Requests in flight everywhere."""
        self.fastest = 1.0
        """Least slowness of a place."""
        self.even = 0
        """Set of the first holders of all places."""
        self.count = 0
        """Replicas."""
        self.finite = False
        """Whether the room of a replica is known."""

    def add(self, place: int, name: int, room: float, slowness: float) -> None:
        """Begin with an idle replica at a free place."""
        while len(self.tokens) <= place:
            for column in ("slowness", "requests", "tokens", "computing", "resident", "room"):
                setattr(self, column, np.append(getattr(self, column), 0.0))
            self.names = np.append(self.names, np.uint64(0))
        self.even = ((1 << 2 * len(self.tokens)) - 1) // 3
        self.names[place], self.room[place] = name, room
        self.pace(place, slowness)
        self.requests[place] = self.tokens[place] = self.computing[place] = self.resident[place] = 0.0
        self.count += 1
        self.finite = self.finite or room != np.inf

    def drop(self, place: int) -> None:
        """Free a place."""
        self.total -= self.tokens[place]
        self.all_requests -= self.requests[place]
        self.count -= 1
        self.requests[place] = self.tokens[place] = np.inf

    def hide(self, place: int) -> Callable[[], None]:
        """Free a place until the returned function is called, before which nothing else may change."""
        requests, tokens = self.requests.item(place), self.tokens.item(place)
        self.drop(place)

        def restore() -> None:
            self.requests[place], self.tokens[place] = requests, tokens
            self.total += tokens
            self.all_requests += requests
            self.count += 1

        return restore

    def load(self, place: int, more: InFlight) -> None:
        """Requests begin at a replica; with negative numbers, they are over."""
        self.requests[place] += more.requests
        self.tokens[place] += more.tokens
        self.computing[place] += more.computing
        self.total += more.tokens
        self.all_requests += more.requests

    def pace(self, place: int, slowness: float) -> None:
        """A replica is known to be so slow."""
        self.slowness[place] = slowness
        self.fastest = self.slowness.min().item()

    def costs(self, prompt: int, output: int, cached: Column) -> Column:
        """[places] seconds, for a prompt of which each replica has `cached` tokens."""
        waits = self.computing
        if self.finite:
            over = self.resident - cached + (prompt + output) - self.room
            waits = waits + np.clip(over, 0.0, self.resident)
        return self._seconds(self.slowness, waits, prompt - cached, output)

    def cost(self, place: int, prompt: int, output: int, cached: int) -> float:
        """The same of one replica."""
        waits = self.computing.item(place)
        if self.finite:
            resident = self.resident.item(place)
            waits += min(max(resident - cached + (prompt + output) - self.room.item(place), 0.0), resident)
        return self._seconds(self.slowness.item(place), waits, prompt - cached, output)

    def least(self, prompt: int, output: int, cached: int) -> float:
        """Seconds below which the cost of no replica is that has `cached` tokens at most."""
        return self._seconds(self.fastest, 0.0, prompt - cached, output)

    def _seconds(self, slowness: T, waits: T, computed: T, output: int) -> T:
        return slowness * ((OWN * computed + waits) * self.rates.prefill_s + self.rates.decode_s * output)
