"""Choices of the router, compared with a reference that looks at every replica and knows no shortcut."""

from __future__ import annotations

import random

import numpy as np
import pytest

from inference.router import Batch, Cleared, Decision, Fingerprinter, Namespace, Removed, Router, RouterConfig, Stored
from inference.router.residency import Event
from tests.inference.reference_router import ReferenceRequest, ReferenceRouter

SIZE = 4
NAMESPACE = Namespace("policy")


class Pair:
    """A router and its reference, which are told the same."""

    def __init__(self, drawn: random.Random, finite: bool) -> None:
        self.drawn, self.finite = drawn, finite
        self.router = Router(NAMESPACE, RouterConfig(block_tokens=SIZE), lambda: 0.0)
        self.reference = ReferenceRouter(Fingerprinter(SIZE), NAMESPACE.value)
        self.flying: list[tuple[Decision, ReferenceRequest]] = []
        self.talks: dict[str, list[int]] = {}
        self.batches: dict[str, int] = {}

    def tokens(self, most: int) -> list[int]:
        """Tokens, of which the first ones are those of others."""
        blocks = [[place, 0 if self.drawn.random() < 0.9 else self.drawn.randrange(3), 0, 0] for place in range(most)]
        found = [token for block in blocks for token in block]
        return found[: self.drawn.randrange(len(found))]

    def prompt(self, session: str | None) -> list[int]:
        """A prompt, which continues the session; now and then it is a shorter one."""
        known = self.talks.get(session or "", [])
        if not known or self.drawn.random() < 0.1:
            made = self.tokens(60)
            return made[: len(known) - 1] if known else made
        return known + [self.drawn.randrange(9) for _ in range(self.drawn.randrange(20))]

    def send(self) -> None:
        """Send a request where both say, which must be the same replica for the same cost."""
        session = self.drawn.choice([None, "a", "b", "c", "d"])
        prompt, most = self.prompt(session), self.drawn.choice([0, 8, 300])
        group = self.drawn.choice([None, "g"])
        given = np.array(prompt, np.int32) if len(prompt) >= SIZE and self.drawn.random() < 0.5 else prompt
        decision = self.router.choose(given, max_tokens=most, session=session, group=group)
        expected = self.reference.choose(prompt, most, session, group)
        assert (decision.replica, decision.cost_s) == (expected.replica, expected.cost_s)
        assert (decision.cached, decision.output) == (expected.cached, expected.output)
        if session is not None:
            self.talks[session] = prompt
        if self.drawn.random() < 0.9:
            self.router.begin(decision)
            self.reference.begin(expected)
            self.flying.append((decision, expected))

    def answer(self) -> None:
        """A request ends, or fails."""
        if self.flying:
            decision, expected = self.flying.pop(self.drawn.randrange(len(self.flying)))
            slow = 3 if decision.replica == "r1" else 1
            seconds = None if self.drawn.random() < 0.2 else slow * (decision.prompt * 1e-3 + 0.5)
            sampled = self.drawn.choice([0, 5, 50])
            self.router.finish(decision, seconds=seconds, sampled=sampled)
            self.reference.finish(expected, seconds, sampled)

    def event(self) -> None:
        """A replica has cached or dropped blocks, its engine's hash of a block is its prefix."""
        name = self.drawn.choice(self.router.replicas)
        caches, holder = self.reference.caches, self.reference.replicas[name].events
        whole = caches.prefixes(self.drawn.choice([*self.talks.values(), self.tokens(60)]))
        start = self.drawn.randrange(len(whole) + 1)
        parent = whole[start - 1] if start else None
        event: Event
        match self.drawn.randrange(10):
            case 0:
                event = Cleared()
                self.reference.clear(name)
            case 1 | 2 | 3:
                event = Removed(whole[start : start + 4])
                self.reference.drop(name, whole[start : start + 4])
            case _:
                tokens = [token for prefix in whole[start:] for token in prefix[-SIZE:]]
                event = Stored(whole[start:], parent, tokens, SIZE)
                if parent is None or parent in caches.held.get(holder, ()):
                    caches.store(holder, whole[start:])
        self.router.apply(name, Batch(self.batches[name], [event]))
        self.batches[name] += 1

    def join(self) -> None:
        """A replica comes, or one goes."""
        name = f"r{self.drawn.randrange(8)}"
        if name not in self.router.replicas:
            room = float(self.drawn.choice([200, 2000])) if self.finite else np.inf
            self.router.add(name, room)
            self.reference.add(name, room)
            self.batches[name] = 0
        elif len(self.router.replicas) > 2:
            self.router.remove(name)
            self.reference.clear(name)
            del self.reference.replicas[name]

    def end(self) -> None:
        """A session ends."""
        session = self.drawn.choice("abcd")
        self.talks.pop(session, None)
        self.router.end(session)
        self.reference.end(session)


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("answers", [0.05, 0.5, 5.0])
def test_choices_are_those_of_the_reference(answers: float, finite: bool) -> None:
    for seed in range(12):
        pair = Pair(random.Random(seed), finite)
        for _ in range(8):
            pair.join()
        steps = [pair.send, pair.answer, pair.event, pair.join, pair.end]
        for step in pair.drawn.choices(steps, [1.0, answers, 0.4, 0.02, 0.02], k=400):
            step()
