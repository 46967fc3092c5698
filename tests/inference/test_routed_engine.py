"""Several engines of one policy behind the router: the same tokens, shared prompts, faults and updates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from inference.engines import BuiltinConfig, Completion, OpenAIConfig, RoutedConfig, SamplingParams, open_engine, routed
from inference.engines.builtin import BuiltinEngine
from inference.engines.delegating import DelegatingEngine
from inference.engines.routed import Member, RoutedEngine
from inference.errors import EngineStopped, EngineUnreachable
from inference.router.publisher import EventPublisher
from inference.router.router import Decision
from tests.inference.conftest import write_checkpoint
from tests.inference.test_cache_events import events_port
from tests.ports import free_port
from tests.vllm.fleet_servers import until

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("policies")
    return write_checkpoint(folder / "first", 0), write_checkpoint(folder / "second", 1)


def opened(directory: Path, replicas: int = 3) -> RoutedEngine:
    return open_engine(RoutedConfig(kind="routed", replicas=(BuiltinConfig(threads=1),) * replicas), directory, "v1")


async def play(engine: RoutedEngine | BuiltinEngine, episode: int) -> list[object]:
    """Turns of an episode; four episodes share a prompt."""
    tokens, turns = [episode // 4 + 1] * 40, []
    for turn in range(3):
        params = SamplingParams(1.0, 9 + turn, episode, (3,), group=f"group {episode // 4}")
        turns.append(await engine.generate(tokens, params))
        tokens = tokens + turns[-1].token_ids + [(episode + each) % 90 for each in range(5)]
    return turns


async def test_replicas_give_the_tokens_of_one_engine(policies: tuple[Path, Path]) -> None:
    engine, alone = opened(policies[0]), BuiltinEngine(policies[0], "v1", threads=1)
    found = await asyncio.gather(*(play(engine, each) for each in range(12)))
    assert found == [await play(alone, each) for each in range(12)]
    pieces = [piece async for piece in engine.stream([5, 6, 7], SamplingParams(1.0, 20, 3))]
    whole = await alone.generate([5, 6, 7], SamplingParams(1.0, 20, 3))
    assert [int(token) for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert await engine.score([5, 6, 7, 8]) == await alone.score([5, 6, 7, 8])
    await engine.close()
    await alone.close()


async def test_turns_stay_and_siblings_meet(policies: tuple[Path, Path]) -> None:
    engine = opened(policies[0])
    chosen: dict[int, list[str]] = {}
    begin, finish = engine._router.begin, engine._router.finish

    def noted(decision: Decision) -> None:
        chosen.setdefault(decision.hashes.item(0), []).append(decision.replica)
        begin(decision)

    def finished(decision: Decision, *, seconds: float | None = None, sampled: int = 0) -> None:
        """All replicas are equally fast: a busy machine may make the one with the prompt seem slow."""
        if seconds is not None:
            seconds = 1e-4 * (decision.prompt - decision.cached) + 1e-3 * sampled
        finish(decision, seconds=seconds, sampled=sampled)

    engine._router.begin = noted  # type: ignore[method-assign]
    engine._router.finish = finished  # type: ignore[method-assign]
    for episode in range(12):
        await play(engine, episode)
        await asyncio.sleep(0.01)
    assert len(chosen) == 3, "first blocks of three groups"
    assert {len(set(each[:4])) for each in chosen.values()} == {1}
    assert engine._router.residency.counters.applied > 0, "engines publish what they have"
    decision = engine._router.choose([1] * 48, max_tokens=1)
    assert decision.cached == 32 and decision.replica == chosen[decision.hashes.item(0)][0]
    await engine.close()


async def test_a_stopped_replica_is_left_out_and_its_calls_are_repeated(
    policies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed, "PAUSE_S", 600.0)
    monkeypatch.setattr(routed, "LONGEST_S", 600.0)
    monkeypatch.setattr(routed, "NOBODY_S", 0.0)
    engine, alone = opened(policies[0]), BuiltinEngine(policies[0], "v1", threads=1)
    assert await engine.version() == "v1"
    await engine._replicas["replica 1"].engine.close()
    found = await asyncio.gather(*(play(engine, each) for each in range(12)))
    assert found == [await play(alone, each) for each in range(12)]
    for name in ("replica 0", "replica 2"):
        await engine._replicas[name].engine.close()
    with pytest.raises(EngineStopped):
        for each in range(9):
            await engine.generate([each], SamplingParams(1.0, 2, each))
    assert engine.serving() == []
    with pytest.raises(EngineStopped, match=r"none of 3 replicas serves policy v1: replica 0: .*; replica 1: "):
        await engine.generate([1], SamplingParams(1.0, 2, 1))
    await engine.close()
    await alone.close()


async def test_stopped_replicas_are_opened_again_with_the_current_policy(
    policies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed, "PAUSE_S", 0.0)
    engine, alone = opened(policies[0], 2), BuiltinEngine(policies[1], "v2", threads=1)
    await engine.load_weights(policies[1], "v2")
    for each in engine._replicas.values():
        await each.engine.close()
    found = await asyncio.gather(*(play(engine, each) for each in range(8)))
    assert found == [await play(alone, each) for each in range(8)]
    async with asyncio.timeout(30):
        while len(engine.serving()) < 2:
            await play(engine, 1)
    await engine.close()
    await alone.close()


class Flawed(DelegatingEngine):
    """A replica with faults on demand, over a built-in engine."""

    def __init__(self, directory: Path) -> None:
        super().__init__(BuiltinEngine(directory, "v1", threads=1))
        self.answers, self.replies, self.loads_at_once = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for each in (self.answers, self.replies, self.loads_at_once):
            each.set()
        self.faults = self.in_flight = self.loads = 0
        self.restarted = False

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        if self.faults:
            self.faults -= 1
            raise EngineUnreachable("a connection was reset")
        self.in_flight += 1
        await self.answers.wait()
        return await super().generate(prompt_ids, params)

    async def load_weights(self, directory: Path, version: str) -> None:
        self.loads += 1
        await self.loads_at_once.wait()
        await super().load_weights(directory, version)
        self.restarted = False

    async def version(self) -> str:
        await self.replies.wait()
        return "older" if self.restarted else await super().version()


def flawed(directory: Path, count: int = 2) -> tuple[list[Flawed], RoutedEngine]:
    engines = [Flawed(directory) for _ in range(count)]
    members = [Member(f"replica {place}", lambda *_, each=each: each) for place, each in enumerate(engines)]  # type: ignore[misc]
    return engines, RoutedEngine(members, directory, "v1")


async def until_all_serve(engine: RoutedEngine, count: int = 2) -> None:
    async with asyncio.timeout(30):
        while len(engine.serving()) < count:
            try:
                await engine.generate([3], SamplingParams(1.0, 1, 3))
            except EngineUnreachable:
                await asyncio.sleep(0.01)


async def test_a_replica_comes_back_although_calls_that_it_had_succeed(
    policies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed, "PAUSE_S", 0.2)
    monkeypatch.setattr(routed, "LONGEST_S", 0.2)
    monkeypatch.setattr(routed, "NOBODY_S", 0.0)
    replicas, engine = flawed(policies[0])
    assert await engine.version() == "v1"
    for each in replicas:
        each.answers.clear()
    good = [asyncio.create_task(engine.generate([2, each], SamplingParams(1.0, 1, each))) for each in range(12)]
    while sum(each.in_flight for each in replicas) < 12:
        await asyncio.sleep(0)
    for each in replicas:
        each.faults = 1
    with pytest.raises(EngineUnreachable):
        await engine.generate([1], SamplingParams(1.0, 1, 99))
    assert engine.serving() == []
    for each in replicas:
        each.answers.set()
    assert len(await asyncio.gather(*good)) == 12
    await until_all_serve(engine)
    await engine.close()


async def test_calls_do_not_wait_for_a_replica_that_is_brought_back(
    policies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed, "PAUSE_S", 0.0)
    (broken, _), engine = flawed(policies[0])
    assert await engine.version() == "v1"
    broken.faults, broken.restarted = 1, True
    broken.replies.clear()
    async with asyncio.timeout(30):
        for each in range(40):
            await engine.generate([each], SamplingParams(1.0, 1, each))
    assert engine.serving() == ["replica 1"]
    broken.loads_at_once.clear()
    broken.replies.set()
    async with asyncio.timeout(30):
        while not broken.loads:
            await engine.generate([3], SamplingParams(1.0, 1, 3))
        await asyncio.gather(*(engine.generate([each], SamplingParams(1.0, 1, each)) for each in range(40)))
    broken.loads_at_once.set()
    await until_all_serve(engine)
    assert broken.loads == 1
    await engine.close()


async def test_calls_wait_for_a_replica_while_none_serves(
    policies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed, "PAUSE_S", 0.0)
    (only,), engine = flawed(policies[0], 1)
    assert await engine.version() == "v1"
    only.faults = 1
    only.replies.clear()
    call = asyncio.create_task(engine.generate([1], SamplingParams(1.0, 2, 1)))
    while engine.serving():
        await asyncio.sleep(0)
    only.replies.set()
    assert len((await call).token_ids) == 2
    only.faults = 1
    only.replies.clear()
    call = asyncio.create_task(engine.generate([1], SamplingParams(1.0, 2, 1)))
    while engine.serving():
        await asyncio.sleep(0)
    monkeypatch.setattr(routed, "NOBODY_S", 0.0)
    with pytest.raises(EngineUnreachable, match="none of 1 replicas serves policy v1"):
        await engine.generate([1], SamplingParams(1.0, 2, 1))
    await engine.close()
    with pytest.raises(EngineStopped):
        await call


async def test_calls_wait_while_every_replica_is_left_out(
    policies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed, "PAUSE_S", 0.5)
    replicas, engine = flawed(policies[0])
    assert await engine.version() == "v1"
    for each in replicas:
        each.faults = 1
    call = asyncio.create_task(engine.generate([1], SamplingParams(1.0, 2, 1)))
    while engine.serving():
        await asyncio.sleep(0)
    further = await asyncio.gather(*(engine.generate([each], SamplingParams(1.0, 2, each)) for each in range(4)))
    assert [len(each.token_ids) for each in (await call, *further)] == [2] * 5
    for each in replicas:
        each.faults = 1
    call = asyncio.create_task(engine.generate([1], SamplingParams(1.0, 2, 1)))
    while engine.serving():
        await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(EngineStopped):
        await call


async def test_an_update_goes_on_without_a_replica_that_does_not_get_there(
    policies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed, "LATE_S", 0.05)
    (slow, _), engine = flawed(policies[0])
    assert await engine.version() == "v1"
    slow.loads_at_once.clear()
    async with asyncio.timeout(30):
        await engine.load_weights(policies[1], "v2")
        spans = [(await engine.generate([each], SamplingParams(1.0, 2, each))).spans for each in range(8)]
    assert spans == [[("v2", 0, 2)]] * 8 and engine.serving() == ["replica 1"]
    slow.loads_at_once.set()
    await until_all_serve(engine)
    assert slow.loads == 1 and await slow.version() == "v2"
    await engine.close()


async def test_an_update_reaches_every_replica_and_forgets_caches(policies: tuple[Path, Path]) -> None:
    engine, alone = opened(policies[0]), BuiltinEngine(policies[1], "v2", threads=1)
    await play(engine, 0)
    await engine.load_weights(policies[1], "v2")
    assert await engine.version() == "v2"
    assert engine._router.choose([1] * 48, max_tokens=1).cached == 0
    found = await asyncio.gather(*(play(engine, each) for each in range(12)))
    assert found == [await play(alone, each) for each in range(12)]
    await engine.close()
    await alone.close()
    with pytest.raises(EngineStopped):
        await engine.generate([1], SamplingParams(1.0, 2, 1))


@contextmanager
def served(directory: Path, version: str, publish: EventPublisher | None = None) -> Iterator[str]:
    """A server of ours in a thread, as `python -m inference serve` runs it."""
    import uvicorn

    from inference.server.app import Application
    from inference.server.serve import Serving

    app, port = Application(Serving("").opener(publish), "policy"), free_port()
    server = uvicorn.Server(uvicorn.Config(app.starlette(), port=port, log_level="error"))

    async def run() -> None:
        await app.open(directory, version)
        await server.serve()
        await app.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    until(lambda: server.started)
    yield f"http://127.0.0.1:{port}/v1"
    server.should_exit = True
    thread.join()


async def test_cache_events_of_a_server_are_followed(policies: tuple[Path, Path]) -> None:
    port = events_port()
    publisher = EventPublisher("127.0.0.1", port)
    with served(policies[0], "v1", publisher) as address:
        replica = OpenAIConfig(kind="openai", base_url=address, events_port=port)
        other, engine = (
            open_engine(RoutedConfig(kind="routed", replicas=each), policies[0], "v1")
            for each in ((replica,), (replica, BuiltinConfig(threads=1)))
        )
        assert await engine.version() == "v1"
        await other.generate([7] * 64, SamplingParams(1.0, 4, 1))
        async with asyncio.timeout(20):
            while engine._router.choose([7] * 65, max_tokens=1).cached < 64:
                await asyncio.sleep(0.02)
        assert engine._router.choose([7] * 65, max_tokens=1).replica == "replica 0", "which another router has asked"
        await engine.load_weights(policies[1], "v2")
        assert engine._router.choose([7] * 65, max_tokens=1).cached == 0
        tasks = [each.task for each in engine._events._followed.values()]
        await engine.close()
        await other.close()
        assert len(tasks) == 1 and all(task.done() for task in tasks)
    publisher.close()


async def test_servers_that_lack_the_policy_or_do_not_answer(
    policies: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routed, "PAUSE_S", 600.0)
    monkeypatch.setattr(routed, "LONGEST_S", 600.0)
    alone = BuiltinEngine(policies[0], "v1", threads=1)
    with served(policies[1], "other") as address:
        gone = f"http://127.0.0.1:{free_port()}/v1"
        replicas = [{"kind": "openai", "base_url": url, "retries": 0} for url in (gone, address)]
        engine = open_engine(
            RoutedConfig.model_validate({"kind": "routed", "replicas": [*replicas, {"threads": 1, "kind": "builtin"}]}),
            policies[0],
            "v1",
        )
        assert await engine.version() == "v1"
        assert sorted(engine.serving()) == ["replica 1", "replica 2"], "the server has loaded the policy"
        found = await asyncio.gather(*(play(engine, each) for each in range(8)))
        assert found == [await play(alone, each) for each in range(8)]
        assert isinstance(engine._replicas["replica 0"].fault, EngineUnreachable)
        await engine.close()
    await alone.close()
