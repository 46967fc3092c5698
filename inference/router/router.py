"""Router: chooses a replica for each prompt, and learns from what becomes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from contracts import tracing
from inference.errors import RouterError
from inference.router.choice import cached_levels, choose
from inference.router.fingerprint import Fingerprinter, Namespace, Tokens, hash64
from inference.router.index import PrefixIndex
from inference.router.residency import Batch, Replay, Residency
from inference.router.score import Columns, InFlight, Slowness
from inference.router.sessions import Session, Sessions

_LENGTHS = 64
"""Answers over which their mean length is taken."""
SESSION_BLOCKS = 1 << 26
"""Blocks of the prompts of all open sessions that are known at most, each of 8 to 24 bytes."""


class RouterConfig(BaseModel):
    """Settings of a router."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    block_tokens: int = Field(default=16, ge=1, le=65536)
    """Tokens of a block of the engines' prefix caches."""
    blocks: int = Field(default=1_000_000, ge=1, le=1 << 30)
    """Blocks that the index knows at most."""
    assumed_s: float = Field(default=600.0, gt=0)
    """Seconds for which a prompt counts as cached by the replica that it was sent to, unless events say so."""
    sessions: int = Field(default=100_000, ge=1)
    """Open sessions that are known at most."""
    key: str = ""
    """Secret of the routers of a fleet, against prompts made to have equal hashes."""


@dataclass(eq=False, slots=True)
class Decision:
    """Where one request goes. Router.begin counts it as in flight, Router.finish ends that."""

    replica: str
    prompt: int
    """Tokens."""
    output: int
    """Tokens that are expected to be sampled."""
    cached: int
    """Tokens of the prompt that the replica is expected to have."""
    cost_s: float
    """Cost of the chosen replica, in seconds; see score."""
    place: int
    hashes: npt.NDArray[np.uint64]
    depths: list[tuple[int, int]]
    session: Session | None
    ahead: int = 0
    """Prompt tokens of earlier requests to compute before."""


class Router:
    """Decides locally and at once. Belongs to one thread."""

    def __init__(
        self, namespace: Namespace, config: RouterConfig | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """namespace: of the policy that replicas serve. clock: seconds."""
        self.config = config or RouterConfig()
        self._namespace = namespace.value
        self._clock = clock
        self._hasher = Fingerprinter(self.config.block_tokens, self.config.key)
        self.index = PrefixIndex(self.config.blocks)
        self.residency = Residency(
            self.index, self._hasher, capacity=self.config.blocks, lifetime_s=self.config.assumed_s
        )
        self.sessions = Sessions(self._hasher, self.config.sessions, SESSION_BLOCKS)
        self._columns = Columns()
        self._names: list[str | None] = []
        self._places: dict[str, int] = {}
        self._slowness: dict[str, Slowness] = {}
        self._length: float | None = None
        """Mean tokens of an answer."""
        self._open: dict[str, set[Decision]] = {}
        """Requests in flight of each replica."""
        self._elsewhere: dict[str, dict[str, InFlight]] = {}
        """Other router -> replica -> its requests in flight there."""
        self.changes = 0
        """Number of changes of `in_flight` so far."""
        self.begun: Callable[[Decision], None] | None = None
        """Called with each decision that begins."""

    @property
    def replicas(self) -> list[str]:
        """Names of the replicas."""
        return list(self._places)

    def flying(self) -> dict[str, float]:
        """Tokens of the requests in flight at each replica."""
        return {name: float(self._columns.tokens[place]) for name, place in self._places.items()}

    def in_flight(self) -> dict[str, InFlight]:
        """This router's own requests in flight at each replica that has any."""
        return {
            name: InFlight(
                len(each),
                sum(one.prompt + one.output for one in each),
                sum(one.prompt - one.cached for one in each),
            )
            for name, each in self._open.items()
            if each
        }

    def elsewhere(self, router: str, loads: Mapping[str, InFlight]) -> None:
        """Another router has these requests in flight, as of its `in_flight`, and no others."""
        before = self._elsewhere.pop(router, {})
        known = {name: load for name, load in loads.items() if name in self._places}
        for name in {*before, *known}:
            now, then = known.get(name, InFlight()), before.get(name, InFlight())
            self._columns.load(self._places[name], InFlight(*(a - b for a, b in zip(now, then, strict=True))))
        if known:
            self._elsewhere[router] = known

    def assume(self, name: str, parent: int | None, hashes: Sequence[int], age: float = 0.0) -> None:
        """Another router sent a prompt to a replica `age` seconds ago. See Residency.continue_assumed.

        Raises RouterError for an unknown replica.
        """
        self.residency.continue_assumed(name, parent, hashes, self._clock() - age)

    def add(self, name: str, room: float = np.inf, replay: Replay | None = None) -> None:
        """A replica serves, its cache is empty. room: tokens that it holds. Raises RouterError for a known name.

        A replica that was here before is as slow as then, a new one as fast as the others.
        """
        if name in self._places:
            raise RouterError(f"the router has the replica {name!r} already: remove it first")
        place = self._names.index(None) if None in self._names else len(self._names)
        self._names[place : place + 1] = [name]
        self._places[name], self._open[name] = place, set()
        slowness = self._slowness.setdefault(name, Slowness())
        self._columns.add(place, hash64(name), room, slowness.value)
        self.residency.add(name, place, self._namespace, replay)

    def remove(self, name: str) -> None:
        """A replica serves no more, and its cache is lost. Its requests count no more; they may still be finished."""
        place = self._place(name)
        self.residency.remove(name)
        self.sessions.leave(place)
        self._columns.drop(place)
        self._names[place] = None
        del self._places[name], self._open[name]
        self.changes += 1
        for loads in self._elsewhere.values():
            loads.pop(name, None)

    def serve_at(self, serving: Collection[str]) -> None:
        """Add and remove replicas, so that they are exactly `serving`."""
        for name in set(self._places) - set(serving):
            self.remove(name)
        for name in serving:
            if name not in self._places:
                self.add(name)

    def route(
        self,
        prompt: Tokens,
        serving: Collection[str],
        *,
        max_tokens: int,
        session: str | None = None,
        group: str | None = None,
    ) -> Decision:
        """Choose among exactly the replicas `serving`, and begin. See `choose`."""
        self.serve_at(serving)
        decision = self.choose(prompt, max_tokens=max_tokens, session=session, group=group)
        self.begin(decision)
        return decision

    @contextmanager
    def hidden(self, names: Collection[str]) -> Iterator[None]:
        """Choose among the other replicas meanwhile, of which there must be one. Nothing may begin or end meanwhile."""
        kept = [self._columns.hide(self._places[name]) for name in names if name in self._places]
        try:
            yield
        finally:
            for restore in kept:
                restore()

    def learn_with(self, other: Router) -> None:
        """Share what is learned of the speed of replicas with another router of this process."""
        self._columns.rates, self._slowness = other._columns.rates, other._slowness

    def serve(self, namespace: Namespace) -> None:
        """All replicas serve another policy: nothing cached before is found any more."""
        self._namespace = namespace.value
        for name in self._places:
            self.residency.serve(name, self._namespace)

    def apply(self, name: str, batch: Batch) -> None:
        """Apply cache events of a replica. See Residency.apply."""
        self.residency.apply(name, batch)

    def restarted(self, name: str) -> None:
        """A replica has lost its cache; requests in flight there still count. Raises RouterError for an unknown one."""
        self.residency.restart(name)

    def choose(
        self, prompt: Tokens, *, max_tokens: int, session: str | None = None, group: str | None = None
    ) -> Decision:
        """Replica for a request. Pass the decision to `begin` before the next choice.

        prompt: token ids; an int32 array is faster than a list. max_tokens: most tokens to sample. session: name of a
        conversation whose prompts continue each other. group: name of requests with a common prompt; None: those with
        an equal one. Raises RouterError without replicas.
        """
        if not self._places:
            raise RouterError("the router has no replica that serves: add one, or wait for one")
        columns, found, stay, known = self._columns, None, -1, 0
        if session is None:
            hashes = self._hasher.prefixes(prompt, self._namespace)
        else:
            found, forgotten = self.sessions.find(session, prompt, self._namespace)
            for each in forgotten:
                self._move(each, -1, 0)
            hashes, stay, known = found.chain.hashes, found.place, found.known
            found.known = len(hashes)
        output = max_tokens if self._length is None else min(max_tokens, int(self._length))
        usable = hashes if len(prompt) % self._hasher.block_tokens else hashes[:-1]  # the last token is always computed
        depths = self.index.depths(usable, known)
        levels = cached_levels(depths, columns.even, self.config.block_tokens)
        if group is not None:
            meeting = hash64(group)
        else:
            meeting = hashes.item(len(hashes) - 1) if len(hashes) else hash64(str(list(prompt)))
        place, cost, had = choose(columns, len(prompt), output, levels, meeting, stay)
        name = self._names[place]
        assert name is not None, "free places are never chosen"
        return Decision(name, len(prompt), output, had, cost, place, hashes, depths, found)

    def begin(self, decision: Decision) -> None:
        """The request is sent: it counts as in flight until `finish`, and its prompt as cached there from now on."""
        place, now = decision.place, self._clock()
        if self._places.get(decision.replica) != place:
            raise RouterError(f"replica {decision.replica!r} was removed since it was chosen: choose again")
        self._open[decision.replica].add(decision)
        self.changes += 1
        if tracing.is_on():
            known = {"triplane.prompt_tokens": decision.prompt, "triplane.cached_tokens": decision.cached}
            tracing.event("router.choice", {"triplane.replica": decision.replica, **known})
        decision.ahead = int(self._columns.computing[place])
        self._columns.load(place, InFlight(1, decision.prompt + decision.output, decision.prompt - decision.cached))
        if decision.session is not None:
            self._move(decision.session, place, decision.prompt)
        self.residency.expire(now)
        self.residency.assume(decision.replica, decision.hashes, decision.depths, now)
        if self.begun is not None:
            self.begun(decision)

    def finish(self, decision: Decision, *, seconds: float | None = None, sampled: int = 0) -> None:
        """A request is over. seconds: that its answer took, with `sampled` tokens, or none if it only scored
        the prompt; None: it failed, learn nothing.

        Idempotent.
        """
        if not self._over(decision) or seconds is None:
            return
        if sampled:
            self._length = sampled if self._length is None else self._length + (sampled - self._length) / _LENGTHS
        computed, rates = decision.prompt - decision.cached + decision.ahead, self._columns.rates
        self._took(decision, rates.expected(computed, sampled), seconds)
        rates.learn(computed, sampled, seconds)

    def expected_s(self, decision: Decision) -> float:
        """Seconds after which the first token of a request that has begun is expected of a replica like the others."""
        return self._columns.rates.expected(decision.prompt - decision.cached + decision.ahead, 1)

    def outpaced(self, decision: Decision, seconds: float) -> None:
        """A request is over because another replica was faster: this one sampled nothing in `seconds`. Idempotent."""
        expected = self.expected_s(decision)
        if self._over(decision) and seconds > expected:
            self._took(decision, expected, seconds)

    def _over(self, decision: Decision) -> bool:
        """A request is not in flight any more. Returns whether it was."""
        flying = self._open.get(decision.replica, set())
        if decision not in flying:
            return False
        flying.remove(decision)
        self.changes += 1
        load = InFlight(-1, -decision.prompt - decision.output, decision.cached - decision.prompt)
        self._columns.load(decision.place, load)
        return True

    def _took(self, decision: Decision, expected: float, seconds: float) -> None:
        slowness = self._slowness[decision.replica]
        slowness.learn(expected, seconds)
        self._columns.pace(decision.place, slowness.value)

    def end(self, session: str) -> None:
        """A session comes back no more. Unknown ones are ignored."""
        found = self.sessions.end(session)
        if found is not None:
            self._move(found, -1, 0)

    def _move(self, session: Session, place: int, resident: int) -> None:
        """The state of a session is now at `place`, or nowhere (-1)."""
        if session.place >= 0:
            self._columns.resident[session.place] -= session.resident
        if place >= 0:
            self._columns.resident[place] += resident
        session.place, session.resident = place, resident

    def _place(self, name: str) -> int:
        if name not in self._places:
            raise RouterError(f"the router has no replica {name!r}: it has {', '.join(self._places) or 'none'}")
        return self._places[name]
