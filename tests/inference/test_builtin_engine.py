import asyncio
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from inference.engines.base import Completion, SamplingParams
from inference.engines.builtin import BuiltinEngine
from inference.engines.kv import KvCache
from inference.errors import EngineError, EngineStopped, OtherArchitecture, RequestTooLong
from tests.inference.conftest import break_engine

pytestmark = pytest.mark.anyio
Call = tuple[list[int], SamplingParams]


def calls(count: int, seed: int, *, longest: int = 60) -> list[Call]:
    chance = random.Random(seed)
    return [
        (
            [chance.randrange(96) for _ in range(chance.randint(1, longest))],
            SamplingParams(chance.choice([0.0, 0.7, 1.0, 1.3]), chance.randint(1, 40), chance.getrandbits(64), (3, 11)),
        )
        for _ in range(count)
    ]


async def answers(engine: BuiltinEngine, wanted: list[Call]) -> list[Completion]:
    return list(await asyncio.gather(*(engine.generate(prompt, params) for prompt, params in wanted)))


async def alone(engine: BuiltinEngine, wanted: list[Call]) -> list[Completion]:
    return [await engine.generate(prompt, params) for prompt, params in wanted]


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("threads", "changes", "crowds"),
    [
        (1, {}, (0, 1, 3, 20, 52)),
        (2, {}, (0, 7)),
        (1, {"num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": False}, (0, 20)),
    ],
)
async def test_the_same_request_gives_the_same_bits_alone_and_in_any_batch(
    write_policy: Callable[..., Path],
    threads: int,
    changes: dict[str, Any],
    crowds: tuple[int, ...],
    threads_restored: None,
) -> None:
    directory, wanted = write_policy("policy", **changes), calls(10, seed=1)
    engine = BuiltinEngine(directory, "v1", threads=1, prefix_bytes=0)
    expected = await alone(engine, wanted)
    await engine.close()
    engine = BuiltinEngine(directory, "v1", threads=threads, prefix_bytes=0)
    for others in crowds:
        mixed = wanted + calls(others, seed=others)
        random.Random(others).shuffle(mixed)
        found = dict(zip((id(call) for call in mixed), await answers(engine, mixed), strict=True))
        assert [found[id(call)] for call in wanted] == expected
    await engine.close()


@pytest.mark.parametrize("length", [100, 130, 200])
async def test_a_longer_neighbour_changes_no_bit(write_policy: Callable[..., Path], length: int) -> None:
    directory = write_policy("policy", max_position_embeddings=512)
    prompt, params = list(range(41)), SamplingParams(4.0, 120, 7, ())
    neighbours = [([index % 90 for index in range(length)], SamplingParams(4.0, 100, seed, ())) for seed in range(3)]
    engine = BuiltinEngine(directory, "v1", threads=1, prefix_bytes=0)
    expected = await engine.generate(prompt, params)
    found = await answers(engine, [(prompt, params), *neighbours])
    await engine.close()
    assert found[0] == expected


async def test_reusing_the_state_of_an_earlier_turn_changes_no_bit(policy: Path) -> None:
    async def episode(engine: BuiltinEngine, index: int) -> list[Completion]:
        tokens, turns = [index % 5, 7, 9, index % 3], []
        for turn in range(4):
            turns.append(await engine.generate(tokens, SamplingParams(1.0, 9 + turn, index, (3,))))
            tokens = tokens + turns[-1].token_ids + [(index + turn + j) % 96 for j in range(7)]
        return turns

    reusing, plain = BuiltinEngine(policy, "v"), BuiltinEngine(policy, "v", prefix_bytes=0, max_batch=3)
    tight = BuiltinEngine(policy, "v", prefix_bytes=200_000)
    results = [await asyncio.gather(*(episode(e, i) for i in range(20))) for e in (reusing, plain, tight)]
    assert results[0] == results[1] == results[2]
    for engine in (reusing, plain, tight):
        await engine.close()


async def test_samples_of_one_prompt_share_its_state_and_change_no_bit(policy: Path) -> None:
    wanted = [([5, index // 8, 7, 8, 9], SamplingParams(1.0, 12, seed=index)) for index in range(48)]
    sharing, plain = BuiltinEngine(policy, "v", max_batch=20), BuiltinEngine(policy, "v", prefix_bytes=0)
    assert await answers(sharing, wanted) == await answers(plain, wanted)
    await sharing.close()
    await plain.close()


async def test_score_gives_the_very_logprobs_of_sampling(policy: Path) -> None:
    engine = BuiltinEngine(policy, "v1")
    for temperature in (1.0, 0.8):
        prompt = [5, 6, 7, 8, 9]
        completion = await engine.generate(prompt, SamplingParams(temperature, 30, seed=4))
        scores = await engine.score(prompt + completion.token_ids, temperature)
        assert scores[0] == 0.0
        assert scores[5:] == completion.logprobs
    await engine.close()


async def test_a_prompt_longer_than_a_chunk_equals_one_read_at_once(
    policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = calls(6, seed=5, longest=200)
    engine = BuiltinEngine(policy, "v1")
    whole, scores = await answers(engine, wanted), await asyncio.gather(*(engine.score(p) for p, _ in wanted))
    await engine.close()
    monkeypatch.setattr("inference.engines.scheduler.CHUNK", 16)
    engine = BuiltinEngine(policy, "v1")
    assert await answers(engine, wanted) == whole
    assert await asyncio.gather(*(engine.score(p) for p, _ in wanted)) == scores
    await engine.close()


async def test_sampled_frequencies_follow_the_reported_logprobs(policy: Path) -> None:
    engine = BuiltinEngine(policy, "v1")
    prompt, count = [4, 4, 4], 4000
    sampled = await answers(engine, [(prompt, SamplingParams(1.0, 1, seed)) for seed in range(count)])
    tokens = [completion.token_ids[0] for completion in sampled]
    for token in sorted(set(tokens), key=tokens.count)[-5:]:
        share = torch.tensor((await engine.score([*prompt, token]))[-1]).exp().item()
        error = (share * (1 - share) / count) ** 0.5
        assert abs(tokens.count(token) / count - share) < 5 * error
    await engine.close()


async def test_a_stop_token_ends_the_completion_and_is_kept(policy: Path) -> None:
    engine = BuiltinEngine(policy, "v1")
    free = await engine.generate([1, 2], SamplingParams(1.0, 50, seed=9))
    stop = free.token_ids[6]
    stopped = await engine.generate([1, 2], SamplingParams(1.0, 50, seed=9, stop_token_ids=(stop,)))
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert (free.finish_reason, stopped.finish_reason) == ("length", "stop")
    await engine.close()


@pytest.mark.parametrize("token", [-1, 2**31, 10**20])
async def test_a_stop_token_that_is_no_token_id_is_refused_and_the_engine_serves_on(policy: Path, token: int) -> None:
    engine = BuiltinEngine(policy, "v1")
    with pytest.raises(EngineError, match=f"stop_token_ids has {token}"):
        await engine.generate([1], SamplingParams(1.0, 2, 0, (3, token)))
    assert len((await engine.generate([1], SamplingParams(1.0, 2, 0))).token_ids) == 2
    await engine.close()


async def test_a_context_that_fills_up_ends_with_length_and_a_full_prompt_is_refused(policy: Path) -> None:
    engine = BuiltinEngine(policy, "v1")
    completion = await engine.generate([1] * 250, SamplingParams(1.0, 50, seed=9))
    assert (len(completion.token_ids), completion.finish_reason) == (6, "length")
    with pytest.raises(RequestTooLong, match="256"):
        await engine.generate([1] * 256, SamplingParams(1.0, 1, seed=9))
    with pytest.raises(EngineError, match="tokenizer"):
        await engine.generate([96], SamplingParams(1.0, 1, seed=9))
    await engine.close()


async def test_memory_is_reserved_for_tokens_that_are_sampled(write_policy: Callable[..., Path]) -> None:
    engine = BuiltinEngine(write_policy("long", max_position_embeddings=1 << 20), "v1", threads=1)
    stops = tuple(range(48))
    short = await engine.generate([1, 2, 3], SamplingParams(1.0, 1 << 40, 7, stops))
    assert (short.finish_reason, engine._scheduler._cache.length) == ("stop", 64)
    long = await engine.generate([1, 2, 3], SamplingParams(1.0, 300, 7))
    assert (len(long.token_ids), engine._scheduler._cache.length) == (300, 512)
    await engine.close()


async def test_a_sequence_without_memory_ends_and_the_others_go_on(
    write_policy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = BuiltinEngine(write_policy("long", max_position_embeddings=1 << 20), "v1", threads=1)
    others = calls(6, 1, longest=30)
    expected, allocate = await alone(engine, others), KvCache._allocate

    def allocated(cache: KvCache, slots: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        if length > 256:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return allocate(cache, slots, length)

    monkeypatch.setattr(KvCache, "_allocate", allocated)
    with pytest.raises(EngineError, match=r"a sequence of 2\d\d tokens can't grow: no memory for 16 sequences of 512"):
        await engine.generate([1, 2, 3], SamplingParams(1.0, 1 << 31, 7))
    endless = asyncio.create_task(engine.generate([4, 5], SamplingParams(1.0, 1 << 31, 7)))
    assert await answers(engine, others) == expected
    for request in (endless, engine.generate([1] * 300, SamplingParams(1.0, 4, 7)), engine.score([1] * 300)):
        with pytest.raises(EngineError, match="no memory"):
            await request
    assert await answers(engine, others) == expected
    await engine.close()


async def test_cancelled_requests_free_their_slot(policy: Path) -> None:
    engine = BuiltinEngine(policy, "v1", max_batch=4)
    expected = await engine.generate([9, 9], SamplingParams(1.0, 40, seed=1))
    endless = [asyncio.create_task(engine.generate([1], SamplingParams(1.0, 250, seed))) for seed in range(12)]
    await asyncio.sleep(0.02)
    for task in endless:
        task.cancel()
    assert await asyncio.wait_for(engine.generate([9, 9], SamplingParams(1.0, 40, seed=1)), 20) == expected
    assert all(task.cancelled() for task in await _settled(endless))
    await engine.close()


async def _settled(tasks: list[asyncio.Task[Completion]]) -> list[asyncio.Task[Completion]]:
    await asyncio.gather(*tasks, return_exceptions=True)
    return tasks


async def test_a_hot_reload_stamps_later_tokens_and_leaves_no_stale_state(policy: Path, other_policy: Path) -> None:
    fresh = BuiltinEngine(other_policy, "v2")
    expected = await fresh.score([1, 2, 3, 4])
    await fresh.close()
    engine = BuiltinEngine(policy, "v1")
    before = await engine.score([1, 2, 3, 4])
    flying = asyncio.create_task(engine.generate([1, 2, 3], SamplingParams(1.0, 250, seed=2)))
    await asyncio.sleep(0.05)
    await engine.load_weights(other_policy, "v2")
    assert await engine.version() == "v2"
    completion = await flying
    versions = [version for version, _, _ in completion.spans]
    assert versions in (["v1", "v2"], ["v1"], ["v2"])
    assert completion.spans[0][1] == 0 and completion.spans[-1][2] == len(completion.token_ids)
    assert await engine.score([1, 2, 3, 4]) == expected != before
    follow_up = [1, 2, 3, *completion.token_ids[:40], 5]
    again = BuiltinEngine(other_policy, "v2")
    params = SamplingParams(1.0, 5, seed=3)
    assert await engine.generate(follow_up, params) == await again.generate(follow_up, params)
    await engine.close()
    await again.close()


async def test_tokens_after_a_reload_are_those_of_the_new_policy_alone(policy: Path, other_policy: Path) -> None:
    versions = {"v1": policy, "v2": other_policy}
    engine = BuiltinEngine(policy, "v1")
    flying = [
        asyncio.create_task(engine.generate([1, 2, 3 + seed], SamplingParams(1.0, 250, seed))) for seed in range(24)
    ]
    await asyncio.sleep(0.1)
    await engine.load_weights(other_policy, "v2")
    completions = await asyncio.gather(*flying)
    await engine.close()
    assert any(len(completion.spans) == 2 for completion in completions)
    for version, directory in versions.items():
        fresh = BuiltinEngine(directory, version)
        for seed, completion in enumerate(completions):
            scores = await fresh.score([1, 2, 3 + seed, *completion.token_ids])
            for _, start, end in [span for span in completion.spans if span[0] == version]:
                assert completion.logprobs[start:end] == scores[3 + start : 3 + end]
        await fresh.close()


async def test_transformers_5_names_the_number_of_experts_otherwise(policy: Path, tmp_path: Path) -> None:
    renamed = Path(shutil.copytree(policy, tmp_path / "renamed"))
    config = json.loads((policy / "config.json").read_text())
    config["num_local_experts"] = config.pop("num_experts")
    (renamed / "config.json").write_text(json.dumps(config))
    own, other = (BuiltinEngine(each, "v", threads=1) for each in (policy, renamed))
    wanted = calls(2, 0)
    assert await alone(own, wanted) == await alone(other, wanted)
    for each in (own, other):
        await each.close()


async def test_another_architecture_is_refused_and_the_policy_in_place_stays(
    policy: Path, write_policy: Callable[..., Path]
) -> None:
    engine = BuiltinEngine(policy, "v1")
    larger = write_policy("larger", num_hidden_layers=3)
    with pytest.raises(OtherArchitecture, match="another architecture"):
        await engine.load_weights(larger, "v2")
    assert await engine.version() == "v1"
    await engine.close()


async def test_closing_aborts_what_is_in_flight_and_refuses_what_follows(policy: Path) -> None:
    engine = BuiltinEngine(policy, "v1")
    flying = asyncio.create_task(engine.generate([1], SamplingParams(1.0, 255, seed=2)))
    await asyncio.sleep(0.02)
    await engine.close()
    await engine.close()
    assert (await flying).finish_reason in ("abort", "length")
    with pytest.raises(EngineError, match="closed"):
        await engine.generate([1], SamplingParams(1.0, 1, seed=2))


async def test_a_failure_of_the_engine_reaches_every_caller(policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = BuiltinEngine(policy, "v1")
    break_engine(monkeypatch)
    found = await asyncio.gather(
        *(engine.generate([1], SamplingParams(1.0, 9, s)) for s in range(3)), return_exceptions=True
    )
    assert all(isinstance(error, EngineStopped) and "no room" in str(error) for error in found)
    with pytest.raises(EngineStopped, match="no room"):
        await engine.score([1, 2])
    with pytest.raises(EngineStopped, match="no room"):
        await engine.version()
    await engine.close()


def test_one_engine_serves_event_loops_one_after_another(policy: Path) -> None:
    engine = BuiltinEngine(policy, "v1")
    params = SamplingParams(1.0, 9, seed=1)
    first, second = (asyncio.run(engine.generate([1, 2], params)) for _ in range(2))
    assert first == second
    asyncio.run(engine.close())
