"""A thousand episodes, and thousands of tokens each: the page stays a few MB, and says what it left out."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from report_world import World, add_episodes, commit

from contracts.episodes import Episode, TokenSequence, ToolCallRecord
from contracts.store import Store, open_store
from ops.report.build import compose
from ops.report.episodes import MAX_DETAIL_BYTES
from ops.report.page import read_data
from ops.report.sources import find_sources
from resources.refs import write_ref
from tests.cli.cli_history import EXPERIMENT

MAX_PAGE = 9_000_000


@pytest.fixture(scope="module")
def pages(world: World, tmp_path_factory: pytest.TempPathFactory) -> dict[int, bytes]:
    """Pages of 1,000 episodes by tokens of each."""
    return {tokens: page(world, open_store(str(tmp_path_factory.mktemp("many"))), tokens) for tokens in (100, 2_000)}


def page(world: World, store: Store, tokens: int) -> bytes:
    clock = random.Random(7)
    policy = commit(store, "checkpoint", {}, {}, lambda out: out.add_bytes("tokenizer.json", tokenizer_of(world)))
    episodes = [many(world.history.solved, number, tokens, clock) for number in range(1_000)]
    rollouts = commit(store, "rollouts", {"policy": policy.ref}, {}, lambda out: add_episodes(out, episodes))
    write_ref(store, EXPERIMENT, "rollouts", "0000", rollouts.ref)
    return compose(find_sources(store, EXPERIMENT, "0000"), [], {}).page


def tokenizer_of(world: World) -> bytes:
    return world.history.artifacts["next"].path("tokenizer.json").read_bytes()


def many(like: Episode, number: int, tokens: int, clock: random.Random) -> Episode:
    """An episode of random tokens: as bad to compress as can be."""
    ids = [clock.randrange(100) for _ in range(tokens)]
    logprobs: list[Any] = [-8 * clock.random() for _ in ids]
    call = ToolCallRecord(0, "exec", "{}", True, "x" * 100_000 if number == 0 else "ok")
    return replace(
        like,
        episode_id=f"{number:032x}",
        group_id=f"{number // 8:032x}",
        sample=number % 8,
        tool_calls=[call],
        sequences=[TokenSequence(ids, [1] * tokens, logprobs, [])],
    )


@pytest.mark.slow
def test_report_contains_a_thousand_short_episodes(pages: dict[int, bytes]) -> None:
    episodes = read_data(pages[100])["viewer"]["episodes"]
    assert len(episodes) == 1_000 and all("sequences" in each for each in episodes)
    assert len(pages[100]) < 1_500_000
    assert episodes[0]["calls"][0]["result"].endswith("more characters]")


@pytest.mark.slow
def test_long_episodes_are_a_fair_sample_of_bounded_size(pages: dict[int, bytes]) -> None:
    assert len(pages[2_000]) < MAX_PAGE
    data = read_data(pages[2_000])["viewer"]
    detailed = [each for each in data["episodes"] if "sequences" in each]
    assert len(data["episodes"]) == data["total"] == 1_000
    assert 0 < len(detailed) * 2_000 * 9 <= MAX_DETAIL_BYTES
    assert {each["sample"] for each in detailed} == {0, 1, 2}
    assert len({each["group_id"] for each in detailed}) == 125
