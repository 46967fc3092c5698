"""The loop on the real engine, with a policy of random weights."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rollouts_script import POLICY, make_plan, make_tasks, play_evaluation

from contracts.chat import ChatTokenizer
from contracts.digests import table_digest
from contracts.episodes import (
    ROUTED_EXPERTS,
    Episode,
    Outcome,
    TokenRole,
    episodes_table,
    read_episodes,
    sequences_table,
)
from contracts.routing import decode_routes
from envd.client import SandboxClient
from envd.local import LocalEnvd
from inference.engines import BuiltinConfig, EngineConfig, RoutedConfig, open_engine
from inference.engines.probes import score_rows
from inference.engines.weights import read_weights
from inference.rollouts.episode import Player

TASKS = make_tasks(6)


@pytest.fixture(scope="module")
def random_policy(tmp_path_factory: pytest.TempPathFactory, tokenizer: ChatTokenizer) -> Path:
    source = Path(__file__).parents[1] / "inference/conftest.py"
    spec = importlib.util.spec_from_file_location("inference_conftest", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    directory = tmp_path_factory.mktemp("policies") / "random"
    written: Path = module.write_checkpoint(directory, 0, vocab_size=tokenizer.vocabulary_size)
    return written


def play(
    directory: Path,
    envd: LocalEnvd,
    tokenizer: ChatTokenizer,
    concurrency: int,
    spec: EngineConfig = BuiltinConfig(threads=1),
    **changes: Any,
) -> tuple[list[Episode], list[list[float]]]:
    settings = {"max_tokens": 220, "max_turn_tokens": 110, "temperature": 4.0, "concurrency": concurrency, **changes}
    config = make_plan(TASKS, 1, **settings).config

    async def run() -> tuple[list[Episode], list[list[float]]]:
        engine = open_engine(spec, directory, POLICY.digest)
        try:
            async with SandboxClient(envd.address) as client:
                player = Player.of(engine, client, tokenizer, config, policy_version=POLICY.digest, key="k")
                episodes = await play_evaluation(player, TASKS.values(), 3, seed=3)
            return episodes, [await engine.score(episode.sequences[0].token_ids, 4.0) for episode in episodes[:4]]
        finally:
            await engine.close()

    return asyncio.run(run())


def test_episodes_do_not_depend_on_concurrency_and_their_logprobs_are_the_policys(
    random_policy: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    together, scores = play(random_policy, envd, tokenizer, 32)
    alone, _ = play(random_policy, envd, tokenizer, 1)
    for table in (episodes_table, sequences_table):
        assert table_digest(table(together)) == table_digest(table(alone))
    assert {Outcome.COMPLETED, Outcome.TRUNCATED} <= {episode.outcome for episode in together}
    for episode, score in zip(together, scores, strict=False):
        (sequence,) = episode.sequences
        for role, sampled, scored in zip(sequence.token_role, sequence.logprobs, score, strict=True):
            assert (sampled is None) == (role != TokenRole.POLICY)
            assert sampled is None or abs(sampled - scored) < 1e-4


@pytest.mark.slow
def test_episodes_of_routed_replicas_are_those_of_one_engine(
    random_policy: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    replicas = RoutedConfig(kind="routed", replicas=(BuiltinConfig(threads=1),) * 3)
    alone, scores = play(random_policy, envd, tokenizer, 8)
    spread, again = play(random_policy, envd, tokenizer, 8, replicas)
    for table in (episodes_table, sequences_table):
        assert table_digest(table(spread)) == table_digest(table(alone))
    assert again == scores
    assert replicas.implementation == BuiltinConfig().implementation


def test_episodes_survive_their_tables(random_policy: Path, envd: LocalEnvd, tokenizer: ChatTokenizer) -> None:
    played, _ = play(random_policy, envd, tokenizer, 8)
    again = read_episodes(episodes_table(played), sequences_table(played))
    for before, after in zip(played, again, strict=True):
        assert before.sequences[0].token_ids == after.sequences[0].token_ids
        assert before.sequences[0].policy_spans == after.sequences[0].policy_spans
        assert (before.episode_id, before.final_state) == (after.episode_id, after.final_state)


def test_recorded_routing_covers_all_turns_up_to_the_last_sampled_token(
    random_policy: Path, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    settings = {"record_routing": True, "max_format_errors": 3, "max_turn_tokens": 50, "max_tokens": 250}
    (played, _), (plain, _) = (
        play(random_policy, envd, tokenizer, 8, **{**settings, "record_routing": recording})
        for recording in (True, False)
    )
    assert table_digest(sequences_table(played)) == table_digest(sequences_table(plain))
    assert max(episode.turns for episode in played) > 1
    table = sequences_table(played, ROUTED_EXPERTS)
    weights = read_weights(random_policy)
    for episode in read_episodes(episodes_table(played), table):
        (sequence,) = episode.sequences
        assert sequence.routed_experts is not None
        routes = decode_routes(sequence.routed_experts)
        last = max(place for place, role in enumerate(sequence.token_role) if role == TokenRole.POLICY)
        _, chosen = score_rows(weights, torch.tensor([sequence.token_ids]))
        np.testing.assert_array_equal(routes, chosen[0].permute(1, 0, 2).numpy()[:last])
