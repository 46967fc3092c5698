"""The router's choices: bounded loads, sessions, siblings, learned rates, and replicas that come and go."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.errors import RouterError
from inference.router import Batch, Decision, Namespace, Router, RouterConfig, Stored
from inference.router.choice import BOUND, FEW, SPREAD
from inference.router.score import Rates

SIZE = 4


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def router(replicas: int, clock: Clock | None = None, **settings: float) -> Router:
    made = Router(Namespace("policy"), RouterConfig(block_tokens=SIZE, **settings), clock or Clock())
    for place in range(replicas):
        made.add(f"r{place}")
    return made


def send(made: Router, prompt: list[int], max_tokens: int = 8, session: str | None = None) -> Decision:
    decision = made.choose(prompt, max_tokens=max_tokens, session=session)
    made.begin(decision)
    return decision


def loads(made: Router, flying: list[Decision]) -> dict[str, int]:
    found = dict.fromkeys(made.replicas, 0)
    for each in flying:
        found[each.replica] += each.prompt + each.output
    return found


REQUEST = st.tuples(st.integers(1, 3), st.integers(1, 400), st.integers(1, 200), st.booleans())


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 7), st.lists(REQUEST, max_size=150))
def test_load_is_bounded_and_returns_to_zero(replicas: int, requests: list[tuple[int, int, int, bool]]) -> None:
    made = router(replicas)
    flying: list[Decision] = []
    for kind, length, max_tokens, ends in requests:
        before = loads(made, flying)
        decision = send(made, [kind] * length, max_tokens)
        size = decision.prompt + decision.output
        there = sum(each.replica == decision.replica for each in flying)
        few = there < max(FEW, SPREAD * (len(flying) + 1) / replicas)
        assert few or before[decision.replica] < BOUND * (sum(before.values()) + size) / replicas
        flying.append(decision)
        if ends:
            made.finish(flying.pop(0), seconds=0.1, sampled=max_tokens)
    for each in flying:
        made.finish(each)
        made.finish(each)
    columns = made._columns
    assert not columns.tokens.any() and not columns.computing.any() and not columns.requests.any()
    assert columns.total == columns.all_requests == 0


def test_empty_request_has_a_replica() -> None:
    made = router(2)
    made.remove("r0")
    decision = made.choose([], max_tokens=0, session="a")
    assert decision.replica == "r1" and decision.cached == 0
    made.begin(decision)


def test_cached_prompt_goes_to_its_replica() -> None:
    made, prompt = router(8), list(range(64))
    made.apply("r5", Batch(0, [Stored(list(range(16)), None, prompt, SIZE)]))
    decision = made.choose([*prompt, 1, 2, 3], max_tokens=8)
    assert decision.replica == "r5" and decision.cached == 64


def test_siblings_meet_at_routers_without_shared_state() -> None:
    drawn = random.Random(3)
    prompts = [[drawn.randrange(1000) for _ in range(40)] for _ in range(200)]
    first, second = router(8), router(8)
    found = [first.choose(prompt, max_tokens=8).replica for prompt in prompts]
    assert found == [second.choose(prompt, max_tokens=8).replica for prompt in prompts]
    assert all(10 < found.count(f"r{place}") < 45 for place in range(8))
    first.remove("r3")
    moved = [first.choose(prompt, max_tokens=8).replica for prompt in prompts]
    assert all(new == old or old == "r3" for new, old in zip(moved, found, strict=True))
    named = {first.choose(prompt, max_tokens=8, group="g").replica for prompt in prompts}
    assert len(named) == 1


def test_siblings_follow_the_first_one_while_its_prompt_is_computed() -> None:
    made = router(2)
    others = [send(made, [place] * 4000) for place in range(6)]
    prompt = list(range(40))
    first = send(made, prompt)
    assert send(made, prompt).replica == first.replica == send(made, prompt).replica
    assert {each.replica for each in others} == {"r0", "r1"}


@pytest.mark.parametrize(("by_group", "most"), [(True, 1.25), (False, 2.0)])
def test_groups_stay_together_and_fill_all_replicas(by_group: bool, most: float) -> None:
    made, drawn = router(8), random.Random(11)
    groups = [[drawn.randrange(1000) for _ in range(400)] for _ in range(8)]
    sent = [each for each in groups for _ in range(16)] if by_group else groups * 16
    flying = [send(made, prompt) for prompt in sent]
    computed = sum(each.prompt - each.cached for each in flying)
    assert computed <= most * 8 * 400, "times one endless cache"
    assert max(loads(made, flying).values()) <= 1.25 * 16 * (400 + 8), "times the mean"


def test_routers_with_the_same_events_decide_alike() -> None:
    first, second = router(5), router(5)
    drawn, sequence, flying = random.Random(7), [0] * 5, []
    for _ in range(300):
        prompt = [drawn.randrange(2) for _ in range(drawn.randrange(1, 40))]
        place = drawn.randrange(5)
        whole = prompt[: len(prompt) // SIZE * SIZE]
        blocks = [tuple(whole[:end]) for end in range(SIZE, len(whole) + 1, SIZE)]
        batch = Batch(sequence[place], [Stored(blocks, None, whole, SIZE)])
        sequence[place] += 1
        decisions = []
        for made in (first, second):
            made.apply(f"r{place}", batch)
            decisions.append(send(made, prompt, session=f"s{place}"))
        assert decisions[0].replica == decisions[1].replica and decisions[0].cost_s == decisions[1].cost_s
        flying.append(decisions)
        if len(flying) > 20:
            for made, decision in zip((first, second), flying.pop(0), strict=True):
                made.finish(decision, seconds=0.5, sampled=4)


def test_session_stays_and_its_turns_are_cached() -> None:
    made = router(6)
    prompt = list(range(50))
    first = send(made, prompt, session="a")
    made.finish(first, seconds=0.2, sampled=8)
    for turn in range(1, 6):
        prompt = [*prompt, *range(turn, turn + 20)]
        decision = send(made, prompt, session="a")
        assert decision.replica == first.replica
        assert decision.cached == (len(prompt) - 20) // SIZE * SIZE
        made.finish(decision, seconds=0.2, sampled=8)
    compacted = send(made, [7, *range(100, 130)], session="a")
    assert compacted.cached == 0
    made.finish(compacted)
    made.end("a")
    made.end("a")
    assert not made._columns.resident.any()


def test_session_stays_where_it_was_if_nothing_is_cached() -> None:
    made = router(6)
    first = send(made, list(range(50)), session="a")
    made.finish(first)
    for turn in range(1, 8):
        decision = send(made, [turn * 1000 + token for token in range(50)], session="a")
        assert decision.cached == 0 and decision.replica == first.replica
        made.finish(decision)


def test_replica_that_is_gone_loses_its_sessions_and_requests() -> None:
    made = router(3)
    first = send(made, list(range(40)), session="a")
    late = made.choose(list(range(40)), max_tokens=8, session="a")
    made.remove(first.replica)
    with pytest.raises(RouterError, match="was removed since it was chosen"):
        made.begin(late if late.replica == first.replica else first)
    second = send(made, list(range(40)), session="a")
    assert second.replica != first.replica and second.cached == 0
    made.add(first.replica)
    made.finish(first, seconds=1.0, sampled=3)
    made.finish(second)
    assert not made._columns.tokens.any() and made._columns.count == 3
    assert made.choose(list(range(40)), max_tokens=8).replica == second.replica


def test_wrong_replicas_are_named() -> None:
    made = router(1)
    with pytest.raises(RouterError, match="no replica 'r7': it has r0"):
        made.remove("r7")
    with pytest.raises(RouterError, match="'r0' already"):
        made.add("r0")
    made.remove("r0")
    with pytest.raises(RouterError, match="no replica that serves"):
        made.choose([1], max_tokens=1)


@pytest.mark.parametrize("session", [None, "a"])
@pytest.mark.parametrize("prompt", [[1, 2, 3, 2**31], [1, None, 2, 3], ["a", "b", "c", "d"]])
def test_prompt_without_token_ids_is_refused(prompt: list[int], session: str | None) -> None:
    made = router(2)
    with pytest.raises(RouterError, match="not a token id"):
        made.choose(prompt, max_tokens=1, session=session)
    assert made.choose([1, 2, 3, 4], max_tokens=1, session=session).prompt == 4


def test_expected_output_is_learned_from_answers_that_sample() -> None:
    made = router(1)
    assert made.choose([1], max_tokens=500).output == 500
    for sampled in (20, 0, 20):
        made.finish(send(made, [1], 500), seconds=0.5, sampled=sampled)
    assert made.choose([1], max_tokens=500).output == 20 and made.choose([1], max_tokens=5).output == 5


def test_nothing_is_cached_after_another_policy() -> None:
    made, prompt = router(3), list(range(40))
    made.finish(send(made, prompt, session="a"), seconds=0.1, sampled=4)
    assert made.choose(prompt, max_tokens=8).cached == 36, "the last token is computed"
    made.serve(Namespace("next"))
    assert made.choose(prompt, max_tokens=8, session="a").cached == 0


def test_assumed_prompts_are_forgotten_in_time() -> None:
    clock = Clock()
    made = router(2, clock, assumed_s=5.0)
    made.finish(send(made, list(range(40))))
    clock.now = 6.0
    send(made, [1, 2])
    assert made.choose(list(range(40)), max_tokens=8).cached == 0 and len(made.index) == 0


def test_slow_replica_gets_less() -> None:
    made, drawn, counts = router(2), random.Random(5), {"r0": 0, "r1": 0}
    for _ in range(200):
        flying = [send(made, [drawn.randrange(1000) for _ in range(400)], 20) for _ in range(2)]
        for each in flying:
            slow = 4 if each.replica == "r0" else 1
            made.finish(each, seconds=slow * (400 * 1e-3 + 20 * 0.01), sampled=20)
    for _ in range(200):
        decision = send(made, [drawn.randrange(1000) for _ in range(400)], 20)
        counts[decision.replica] += 1
        made.finish(decision)
    assert counts["r0"] < 20
    assert made._columns.slowness[0] > 1.2 * made._columns.slowness[1]


def test_full_cache_costs_what_it_drops() -> None:
    made = Router(Namespace("policy"), RouterConfig(block_tokens=SIZE), Clock())
    made.add("full", room=120)
    made.add("free", room=100_000)
    for name in range(12):
        made.finish(send(made, [name] * 40, session=str(name)))
    places = [each.place for each in made.sessions._open.values()]
    assert 1 <= places.count(0) <= 3 and made._columns.resident[0] == 40 * places.count(0)


def test_sessions_are_bounded() -> None:
    made = router(2, sessions=10)
    for name in range(50):
        made.finish(send(made, [name] * 12, session=str(name)))
    assert len(made.sessions._open) == 10 and made._columns.resident.sum() == 120


def test_rates_approach_those_of_the_answers() -> None:
    rates, drawn = Rates(), np.random.default_rng(0)
    for _ in range(200):
        computed, sampled = int(drawn.integers(0, 5000)), int(drawn.integers(1, 500))
        rates.learn(computed, sampled, (computed * 3e-4 + sampled * 1e-2) * drawn.uniform(0.9, 1.1))
    assert [rates.prefill_s, rates.decode_s] == pytest.approx([3e-4, 1e-2], rel=0.1)
    lone = Rates()
    for _ in range(50):
        lone.learn(1000, 0, 0.0)
    assert lone.prefill_s > 0 and lone.decode_s > 0


def test_sessions_are_bounded_by_the_length_of_their_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.router.router.SESSION_BLOCKS", 100)
    made = router(2)
    for number in range(20):
        for turn in range(1, 4):
            send(made, [number] * SIZE * 10 * turn, session=f"s{number}")
    assert len(made.sessions._open) == 3, "of 30 blocks each"
    for number in range(20):
        made.end(f"s{number}")
    assert made.sessions._left == 100
    send(made, [1] * SIZE * 200, session="longer than all may be together")
    assert len(made.sessions._open) == 1
