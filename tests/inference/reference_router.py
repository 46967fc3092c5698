"""Naive references of the router's index, every replica's blocks as sets of token tuples, and of its choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inference.router.choice import BOUND, FEW, SPREAD
from inference.router.fingerprint import Fingerprinter, hash64
from inference.router.score import OWN, Rates, Slowness

Prefix = tuple[int, ...]


class ReferenceCaches:
    """What each replica holds, by whole prefixes."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.held: dict[int, set[Prefix]] = {}

    def prefixes(self, tokens: Sequence[int]) -> list[Prefix]:
        """Prefixes of whole blocks, shortest first."""
        size = self.block_tokens
        return [tuple(tokens[: end * size]) for end in range(1, len(tokens) // size + 1)]

    def store(self, holder: int, prefixes: Sequence[Prefix]) -> None:
        """Add prefixes, each that of one block."""
        self.held.setdefault(holder, set()).update(prefixes)

    def remove(self, holder: int, prefixes: Sequence[Prefix]) -> None:
        """Take prefixes away."""
        self.held.setdefault(holder, set()).difference_update(prefixes)

    def depths(self, tokens: Sequence[int]) -> dict[int, int]:
        """Blocks of the prompt that each holder has without a gap; holders of none are left out."""
        found = {}
        for holder, held in self.held.items():
            depth = 0
            for prefix in self.prefixes(tokens):
                if prefix not in held:
                    break
                depth += 1
            if depth:
                found[holder] = depth
        return found


@dataclass(eq=False)
class ReferenceRequest:
    """A request, and where it goes."""

    replica: str
    cost_s: float
    prompt: int
    output: int
    cached: int
    tokens: Sequence[int]
    session: str | None
    ahead: int = 0


class ReferenceReplica:
    """What the reference knows of a replica."""

    def __init__(self, place: int, room: float, slowness: Slowness) -> None:
        self.events, self.assumed = 2 * place, 2 * place + 1
        self.room, self.slowness = room, slowness
        self.flying: list[ReferenceRequest] = []
        self.sessions: dict[str, int] = {}
        """Tokens of the sessions whose last turn was here."""

    @property
    def computing(self) -> int:
        """Prompt tokens in flight that were not cached."""
        return sum(each.prompt - each.cached for each in self.flying)

    def cost(self, prompt: int, output: int, cached: int, rates: Rates) -> float:
        """Seconds, by the formula of inference.router.score."""
        resident = sum(self.sessions.values())
        displaced = min(max(resident - cached + prompt + output - self.room, 0.0), resident)
        compute = OWN * (prompt - cached) + self.computing + displaced
        return self.slowness.value * (compute * rates.prefill_s + output * rates.decode_s)


class ReferenceRouter:
    """The router's choices by its formulas, replica by replica, from sets of token tuples."""

    def __init__(self, hasher: Fingerprinter, namespace: int) -> None:
        self._hasher, self._namespace = hasher, namespace
        self.caches = ReferenceCaches(hasher.block_tokens)
        self.replicas: dict[str, ReferenceReplica] = {}
        self._slowness: dict[str, Slowness] = {}
        self._rates, self._length = Rates(), 0.0
        self._added = 0

    def add(self, name: str, room: float) -> None:
        """See Router.add."""
        self.replicas[name] = ReferenceReplica(self._added, room, self._slowness.setdefault(name, Slowness()))
        self._added += 1

    def choose(self, tokens: Sequence[int], most: int, session: str | None, group: str | None) -> ReferenceRequest:
        """See Router.choose."""
        prompt, output = len(tokens), min(most, int(self._length)) if self._length else most
        depths = self.caches.depths(tokens[:-1])
        cached = {
            name: self._hasher.block_tokens * max(depths.get(each.events, 0), depths.get(each.assumed, 0))
            for name, each in self.replicas.items()
        }
        uniform = len(set(cached.values())) == 1
        flying = {name: sum(one.prompt + one.output for one in each.flying) for name, each in self.replicas.items()}
        mean = (sum(flying.values()) + max(1, prompt + output)) / len(self.replicas)
        requests = sum(len(each.flying) for each in self.replicas.values())
        few = max(FEW, SPREAD * (requests + 1) / len(self.replicas))
        costs = {
            name: each.cost(prompt, output, cached[name], self._rates)
            for name, each in self.replicas.items()
            if flying[name] < (mean if uniform else BOUND * mean)
            or (not uniform and cached[name] and len(each.flying) < few)
        }
        best = min(costs, key=costs.__getitem__)
        slack = (prompt - cached[best]) * self._rates.prefill_s if uniform else 0.0
        good = [name for name, cost in costs.items() if cost <= costs[best] + slack]
        hashes = self._hasher.prefixes(tokens, self._namespace).tolist()
        meeting = hash64(group) if group is not None else hashes[-1] if hashes else hash64(str(list(tokens)))
        stay = next((name for name in good if session in self.replicas[name].sessions), None)
        name = stay or max(good, key=lambda each: _mixed(hash64(each) ^ meeting))
        return ReferenceRequest(name, costs[name], prompt, output, cached[name], tokens, session)

    def begin(self, request: ReferenceRequest) -> None:
        """See Router.begin."""
        replica = self.replicas[request.replica]
        request.ahead = replica.computing
        replica.flying.append(request)
        self.caches.store(replica.assumed, self.caches.prefixes(request.tokens))
        if request.session is not None:
            self.end(request.session)
            replica.sessions[request.session] = request.prompt

    def finish(self, request: ReferenceRequest, seconds: float | None, sampled: int) -> None:
        """See Router.finish."""
        replica = self.replicas.get(request.replica)
        if replica is None or request not in replica.flying:
            return
        replica.flying.remove(request)
        if seconds is not None:
            if sampled:
                self._length += (sampled - self._length) / 64 if self._length else sampled
            computed = request.prompt - request.cached + request.ahead
            replica.slowness.learn(self._rates.expected(computed, sampled), seconds)
            self._rates.learn(computed, sampled, seconds)

    def end(self, session: str) -> None:
        """See Router.end."""
        for each in self.replicas.values():
            each.sessions.pop(session, None)

    def drop(self, name: str, prefixes: Sequence[Prefix]) -> None:
        """An event says that the replica has dropped prefixes; those that no event said it has are ignored."""
        replica = self.replicas[name]
        known = [each for each in prefixes if each in self.caches.held.get(replica.events, ())]
        for holder in (replica.events, replica.assumed):
            self.caches.remove(holder, known)

    def clear(self, name: str) -> None:
        """The replica has nothing cached."""
        for holder in (self.replicas[name].events, self.replicas[name].assumed):
            self.caches.held.pop(holder, None)


def _mixed(value: int) -> int:
    """The finalizer of splitmix64."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31
