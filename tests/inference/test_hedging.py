"""Turns that are slow to begin are hedged, and streams of replicas that fail go on at others."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from inference.engines import BuiltinConfig, RoutedConfig, SamplingParams, SglangConfig, VllmConfig, hedging
from inference.engines.base import Completion, Piece, StreamsWhole, collect, empty_piece
from inference.engines.builtin import BuiltinEngine
from inference.engines.delegating import DelegatingEngine
from inference.engines.routed import Member, RoutedEngine
from inference.errors import EngineError, EngineUnreachable
from tests.inference.conftest import write_checkpoint

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("policies") / "first", 0)


class Replica(DelegatingEngine):
    """The built-in engine with streams that wait before their first piece, or break off."""

    def __init__(self, directory: Path, begun: list[Replica]) -> None:
        super().__init__(BuiltinEngine(directory, "v1", threads=1))
        self._begun = begun
        self.wait: list[asyncio.Event] = []
        """Event for which the next stream waits."""
        self.break_after: int | None = None
        """Tokens after which the next stream fails."""
        self.closed = 0

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
        self._begun.append(self)
        limit, self.break_after = self.break_after, None
        try:
            made = await self.inner.generate(prompt_ids, params)
            if self.wait:
                await self.wait.pop().wait()
            for place, token in enumerate(made.token_ids):
                if place == limit:
                    raise EngineUnreachable("it is gone")
                last = place == len(made.token_ids) - 1
                spans = [("v1", 0, 1)]
                logprobs = np.array(made.logprobs[place : place + 1], np.float32)
                yield Piece(np.array([token], np.int32), logprobs, spans, made.finish_reason if last else None)
        finally:
            self.closed += 1


def opened(
    directory: Path, replicas: int = 2, delay_s: float | None = 0.05
) -> tuple[RoutedEngine, list[Replica], list[Replica]]:
    """An engine, its replicas, and those that have begun a stream, in order."""
    begun: list[Replica] = []
    made = [Replica(directory, begun) for _ in range(replicas)]
    members = [Member(str(place), lambda *_, each=each: each) for place, each in enumerate(made)]  # type: ignore[misc]
    return RoutedEngine(members, directory, "v1", delay_s), made, begun


PROMPT, PARAMS = [5, 6, 7], SamplingParams(1.0, 20, 3, (11,))


async def test_a_late_turn_goes_on_at_the_replica_with_the_first_token(
    policy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine, replicas, begun = opened(policy)
    expected = await replicas[0].inner.generate(PROMPT, PARAMS)
    released: dict[int, asyncio.Event] = {}
    for winner, won in ((1, 1), (0, 1)):
        begun.clear()
        for each in replicas:
            each.wait, each.closed = [asyncio.Event()], 0
            released[id(each)] = each.wait[0]
        turn = asyncio.create_task(engine.generate(PROMPT, PARAMS))
        while len(begun) < 2:
            await asyncio.sleep(0.01)
        assert {id(each) for each in begun} == set(released) and not turn.done()
        released[id(begun[winner])].set()
        assert await turn == expected, "replicas give the same tokens"
        assert [each.closed for each in replicas] == [1, 1], "the other one is canceled"
        assert engine.hedging is not None and engine.hedging.won == won
        assert engine._router.in_flight() == {}
    assert (engine.hedging.requests, engine.hedging.sent) == (2, 2)
    slow = [name for name, each in engine._router._slowness.items() if each.value > 1]
    assert slow, "the router learns who was late"
    await engine.close()
    await engine.close()
    assert caplog.text.count("hedged 2 of 2 turns; 1 began at the second replica") == 1


async def test_the_router_learns_from_streams_that_are_closed_at_their_last_piece(policy: Path) -> None:
    for delay_s in (None, 60.0):
        engine, _, _ = opened(policy, delay_s=delay_s)
        await engine.version()
        before = vars(engine._router._columns.rates).copy()
        for each in engine._replicas.values():
            each._failures = 3
        for seed in range(8):
            made = await collect(engine.stream([seed, 6, 7], PARAMS))
        after = vars(engine._router._columns.rates)
        assert after["prefill_s"] != before["prefill_s"], "their speed"
        assert engine._router._length == len(made.token_ids) == PARAMS.max_tokens, "their length"
        assert 0 in {each._failures for each in engine._replicas.values()}, "that they are well"
        await engine.close()


async def test_without_a_delay_or_another_replica_a_late_turn_is_waited_for(policy: Path) -> None:
    for replicas, delay_s in ((2, None), (1, 0.01)):
        engine, made, begun = opened(policy, replicas, delay_s)
        for each in made:
            each.wait = [asyncio.Event()]
        events = [each.wait[0] for each in made]
        turn = asyncio.create_task(collect(engine.stream(PROMPT, PARAMS)))
        await asyncio.sleep(0.3)
        assert len(begun) == 1
        for event in events:
            event.set()
        assert (await turn).finish_reason
        await engine.close()


async def test_hedges_are_a_bounded_share_of_all_turns(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hedging, "FIRST", 2)
    engine, replicas, begun = opened(policy, delay_s=0.01)
    never = asyncio.Event()
    for each in replicas:
        each.wait = [never] * 40
    turns = [asyncio.create_task(engine.generate(PROMPT, SamplingParams(1.0, 4, seed))) for seed in range(30)]
    await asyncio.sleep(0.6)
    assert engine.hedging is not None
    assert engine.hedging.sent == 2 + 0.1 * 30 and len(begun) == 30 + engine.hedging.sent
    never.set()
    await asyncio.gather(*turns)
    assert engine._router.in_flight() == {}
    await engine.close()


async def test_a_canceled_turn_ends_both_of_its_requests(policy: Path) -> None:
    engine, replicas, begun = opened(policy)
    for each in replicas:
        each.wait = [asyncio.Event()]
    turn = asyncio.create_task(engine.generate(PROMPT, PARAMS))
    while len(begun) < 2:
        await asyncio.sleep(0.01)
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    assert [each.closed for each in replicas] == [1, 1] and engine._router.in_flight() == {}
    await engine.close()


async def test_the_second_replica_answers_if_the_late_one_fails(policy: Path) -> None:
    engine, replicas, begun = opened(policy)
    expected = await replicas[0].inner.generate(PROMPT, PARAMS)
    events = {}
    for each in replicas:
        each.wait, each.break_after = [asyncio.Event()], None
        events[id(each)] = each.wait[0]
    turn = asyncio.create_task(engine.generate(PROMPT, PARAMS))
    while not begun:
        await asyncio.sleep(0.001)
    await begun[0].inner.close()
    while len(begun) < 2:
        await asyncio.sleep(0.01)
    events[id(begun[1])].set()
    assert await turn == expected
    await engine.close()


@pytest.mark.parametrize("delay_s", [None, 5.0])
async def test_a_stream_that_breaks_off_goes_on_with_the_same_tokens(policy: Path, delay_s: float | None) -> None:
    for after in (0, 1, 7, 19):
        engine, replicas, begun = opened(policy, 3, delay_s)
        params = SamplingParams(1.0, 20, 3)
        expected = await replicas[0].inner.generate(PROMPT, params)
        for each in replicas:
            each.break_after = after
        replicas[2].break_after = None
        pieces = [piece async for piece in engine.stream(PROMPT, params)]
        tokens = [int(token) for piece in pieces for token in piece.token_ids]
        assert (tokens, pieces[-1].finish_reason) == (expected.token_ids, expected.finish_reason)
        assert [value for piece in pieces for value in piece.logprobs.tolist()] == expected.logprobs
        assert len(begun) <= 3
        await engine.close()


async def test_a_stream_whose_replicas_all_fail_raises_the_last_fault(policy: Path) -> None:
    engine, replicas, begun = opened(policy, 4)
    for each in replicas:
        each.break_after = 2
    with pytest.raises(EngineUnreachable, match="it is gone"):
        await collect(engine.stream(PROMPT, SamplingParams(1.0, 20, 3)))
    assert len(begun) == 3, "at most three replicas are tried"
    await engine.close()


class Timed(StreamsWhole):
    """A replica whose answers have random lengths; some begin late, whatever their length. Each token takes time."""

    def __init__(self, seed: int, token_s: float) -> None:
        self._random, self._token_s = random.Random(seed), token_s

    async def version(self) -> str:
        return "v1"

    async def close(self) -> None: ...

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        return [0.0] * len(token_ids)

    async def load_weights(self, directory: Path, version: str) -> None: ...

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        return await collect(self.stream(prompt_ids, params))

    def streams(self, params: SamplingParams) -> bool:
        return True

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
        late, length = self._random.random() < 0.5, self._random.choice((1, 9))
        await asyncio.sleep(0.2 * late)
        yield empty_piece()
        await asyncio.sleep(self._token_s * length)
        tokens = np.ones(length, np.int32)
        yield Piece(tokens, np.zeros(length, np.float32), [("v1", 0, length)], "stop")


async def test_hedging_prefers_no_length_of_answers(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are 1 or 9, each with probability 1/2: so their mean is 5, with a standard error of 0.25."""
    monkeypatch.setattr(hedging, "SHARE", 1.0)
    members = [Member(str(seed), lambda *_, seed=seed: Timed(seed, 0.02)) for seed in range(2)]  # type: ignore[misc]
    engine = RoutedEngine(members, policy, "v1", 0.02)
    turns = [engine.generate([seed], SamplingParams(1.0, 9, seed)) for seed in range(256)]
    lengths = [len(each.token_ids) for each in await asyncio.gather(*turns)]
    assert engine.hedging is not None and engine.hedging.won > 30, "many turns were hedged"
    assert abs(np.mean(lengths) - 5) < 1
    await engine.close()


async def test_a_stream_without_an_end_is_an_error() -> None:
    async def broken() -> AsyncGenerator[Piece]:
        yield empty_piece()

    with pytest.raises(EngineError, match="without a finish reason"):
        await collect(broken())


async def test_settings_that_can_not_hedge_are_refused() -> None:
    served = SglangConfig(kind="sglang", base_url="http://a:1")
    for replicas, said in (((BuiltinConfig(),), "second replica"), ((BuiltinConfig(), served), "sglang sends whole")):
        with pytest.raises(ValidationError, match=said):
            RoutedConfig(kind="routed", replicas=replicas, hedging_delay_s=1.0)
    with pytest.raises(ValidationError, match="hedging_delay_s needs a fleet"):
        VllmConfig(base_url="http://a:1", hedging_delay_s=1.0)
