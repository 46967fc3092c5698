from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from rollouts_script import POLICY, ScriptedEngine, call, one_file_task, read_then_maybe_fix

from contracts.chat import ChatTokenizer
from contracts.episodes import Episode, Outcome, Slot, TokenRole
from contracts.errors import InfraFault
from envd.client import Limits
from envd.local import LocalEnvd
from envd.operations.client import OperationsClient
from inference.engines.base import Completion, SamplingParams
from inference.errors import StaleVersion
from inference.rollouts.config import RolloutConfig
from inference.rollouts.episode import Player, play_episode
from inference.rollouts.workspace import Workspaces

SLOT = Slot("test", "0001", "g", "task-000", 0, 5)


def play(envd: LocalEnvd, engine: ScriptedEngine, tokenizer: ChatTokenizer, **config: Any) -> Episode:
    settings = RolloutConfig.model_validate({"max_tokens": 1200, "max_turn_tokens": 200, **config})

    async def run() -> Episode:
        async with OperationsClient(envd.address) as client:
            before = (await client.info()).live
            workspaces = Workspaces(client, Limits(), settings.episode_timeout_s)
            gate = asyncio.Semaphore(4)
            player = Player(engine, workspaces, tokenizer, settings, POLICY.digest, "k", gate)
            episode = await play_episode(player, one_file_task(0), SLOT, "g")
            assert (await client.info()).live == before, "a sandbox was left behind"
            return episode

    return asyncio.run(run())


def turns(*script: Any) -> Any:
    return lambda turn, seed: script[turn]


def test_an_episode_reads_edits_stops_and_leaves_its_diff(envd: LocalEnvd, tokenizer: ChatTokenizer) -> None:
    episode = play(envd, ScriptedEngine(tokenizer, read_then_maybe_fix), tokenizer)
    assert (episode.outcome, episode.turns, len(episode.tool_calls)) == (Outcome.COMPLETED, 3, 2)
    assert episode.tool_calls[0].result == "1 def f(): return 1\n2 # 0"
    assert b"-def f(): return 1" in episode.final_diff
    (sequence,) = episode.sequences
    text = tokenizer.decode(sequence.token_ids)
    assert text.startswith("<|im_start|>user\nMake f of m0 return 2.<|im_end|>\n<|im_start|>assistant\n<tool_call>")
    assert "<tool_response>1 def f(): return 1\n2 # 0</tool_response>" in text
    assert text.endswith("done<|im_end|>")
    assert sequence.token_role[-1] == TokenRole.POLICY
    assert episode.telemetry["engine_tokens"] == episode.policy_tokens


def test_several_calls_in_a_turn_answer_in_order(envd: LocalEnvd, tokenizer: ChatTokenizer) -> None:
    script = turns([call("exec", command="sleep 0.2; echo a"), call("exec", command="echo b"), call("nope")], "done")
    episode = play(envd, ScriptedEngine(tokenizer, script), tokenizer)
    assert [record.result.split("\n")[0] for record in episode.tool_calls] == ["a", "b", "error: no such tool: nope"]
    assert [record.ok for record in episode.tool_calls] == [True, True, False]
    assert episode.outcome is Outcome.COMPLETED


def test_an_episode_without_calls_needs_no_sandbox(tokenizer: ChatTokenizer) -> None:
    async def run() -> Episode:
        config = RolloutConfig()
        workspaces = Workspaces(OperationsClient("unix:/nowhere"), Limits(), 1.0)
        engine = ScriptedEngine(tokenizer, turns("done"))
        player = Player(engine, workspaces, tokenizer, config, POLICY.digest, "k", asyncio.Semaphore(1))
        return await play_episode(player, one_file_task(0), SLOT, "g")

    episode = asyncio.run(run())
    assert (episode.outcome, episode.final_diff) == (Outcome.COMPLETED, b"")


def test_one_format_error_is_answered_and_the_next_ends_the_episode(envd: LocalEnvd, tokenizer: ChatTokenizer) -> None:
    bad = "<tool_call>{not json</tool_call>"
    episode = play(envd, ScriptedEngine(tokenizer, turns(bad, bad)), tokenizer)
    assert (episode.outcome, episode.format_errors, episode.tool_calls) == (Outcome.FORMAT_ERROR, 2, [])
    assert "error: tool call is not JSON" in tokenizer.decode(episode.sequences[0].token_ids)
    recovered = play(envd, ScriptedEngine(tokenizer, turns(bad, "done")), tokenizer)
    assert (recovered.outcome, recovered.format_errors) == (Outcome.COMPLETED, 1)


@pytest.mark.parametrize("limit", [{"max_turns": 2}, {"max_turn_tokens": 20}, {"max_tokens": 200}, {"max_tokens": 60}])
def test_running_out_of_turns_or_tokens_truncates(
    limit: dict[str, int], envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    config = {"max_tokens": 1200, "max_turn_tokens": min(200, limit.get("max_tokens", 200)), **limit}
    episode = play(envd, ScriptedEngine(tokenizer, read_then_maybe_fix), tokenizer, **config)
    assert episode.outcome is Outcome.TRUNCATED
    assert len(episode.sequences[0].token_ids) <= config["max_tokens"]


def test_a_context_the_engine_cannot_hold_truncates(envd: LocalEnvd, tokenizer: ChatTokenizer) -> None:
    episode = play(envd, ScriptedEngine(tokenizer, read_then_maybe_fix, context=110), tokenizer)
    assert (episode.outcome, episode.turns) == (Outcome.TRUNCATED, 1)


class FlakyEngine(ScriptedEngine):
    """Aborts the first `faults` requests, as an engine that goes away does."""

    faults = 0

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        if self.faults:
            self.faults -= 1
            return Completion([], [], [], "abort")
        return await super().generate(prompt_ids, params)


@pytest.mark.parametrize("profile", ["deterministic", "throughput"])
@pytest.mark.parametrize(("faults", "outcome"), [(1, "completed"), (2, "infra_error")])
def test_faults_are_retried_with_the_same_seed_and_then_recorded(
    faults: int, outcome: str, profile: str, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    engine = FlakyEngine(tokenizer, read_then_maybe_fix)
    engine.faults = faults
    episode = play(envd, engine, tokenizer, max_attempts=2, profile=profile)
    assert (episode.outcome.value, episode.seed) == (outcome, SLOT.token_seed)
    assert episode.attempt == (profile == "throughput") and episode.telemetry["retries"] == 1


def test_a_fault_leaves_no_trace_in_a_deterministic_episode(envd: LocalEnvd, tokenizer: ChatTokenizer) -> None:
    engine = FlakyEngine(tokenizer, read_then_maybe_fix)
    undisturbed = play(envd, engine, tokenizer)
    engine.faults = 1
    disturbed = play(envd, engine, tokenizer)
    assert disturbed.telemetry["retries"] == 1
    assert dataclasses.replace(disturbed, telemetry={}) == dataclasses.replace(undisturbed, telemetry={})


@pytest.mark.parametrize("profile", ["deterministic", "throughput"])
def test_a_dead_sandbox_server_is_an_infra_error_and_a_fault_of_the_whole_step_where_bits_count(
    profile: str, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("envd.client.RPC_GRACE_S", 0.2)
    monkeypatch.setattr("inference.rollouts.workspace._RETURN_S", 0.5)
    with LocalEnvd() as server:
        address = server.address
    script = turns([call("read", path="m.py")], "done")

    async def run() -> Episode:
        settings = {"max_tokens": 1200, "max_turn_tokens": 200, "max_attempts": 2, "profile": profile}
        config = RolloutConfig.model_validate(settings)
        async with OperationsClient(address) as client:
            workspaces = Workspaces(client, Limits(), config.episode_timeout_s)
            gate = asyncio.Semaphore(1)
            player = Player(ScriptedEngine(tokenizer, script), workspaces, tokenizer, config, POLICY.digest, "k", gate)
            return await play_episode(player, one_file_task(0), SLOT, "g")

    if profile == "throughput":
        assert asyncio.run(run()).outcome is Outcome.INFRA_ERROR
        return
    with pytest.raises(InfraFault, match=r"envd at unix:\S+ did not answer .* gave up after 2 attempts"):
        asyncio.run(run())


@pytest.mark.parametrize(("profile", "retries"), [("throughput", 0), ("deterministic", 1)])
def test_time_in_agent_calls_times_the_episode_out(
    profile: str, retries: int, envd: LocalEnvd, tokenizer: ChatTokenizer
) -> None:
    script = turns([call("exec", command="sleep 5")], "done")
    engine = ScriptedEngine(tokenizer, script)
    timed_out = play(envd, engine, tokenizer, profile=profile, episode_timeout_s=0.4, max_attempts=2)
    assert (timed_out.outcome, timed_out.turns) == (Outcome.TIMED_OUT, 1)
    assert timed_out.telemetry["retries"] == retries


def test_engine_time_is_no_outcome_under_the_deterministic_profile(envd: LocalEnvd, tokenizer: ChatTokenizer) -> None:
    class Slow(ScriptedEngine):
        async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
            await asyncio.sleep(1)
            return await super().generate(prompt_ids, params)

    limits = {"episode_timeout_s": 0.4, "max_attempts": 1}
    slow = Slow(tokenizer, read_then_maybe_fix)
    assert play(envd, slow, tokenizer, **limits).outcome is Outcome.INFRA_ERROR
    assert play(envd, slow, tokenizer, profile="throughput", **limits).outcome is Outcome.TIMED_OUT


def test_another_policy_version_is_refused_or_recorded_by_profile(envd: LocalEnvd, tokenizer: ChatTokenizer) -> None:
    engine = ScriptedEngine(tokenizer, read_then_maybe_fix)
    engine._version = "e" * 64
    with pytest.raises(StaleVersion, match="eeeeeeeeeeee"):
        play(envd, engine, tokenizer)
    spans = play(envd, engine, tokenizer, profile="throughput").sequences[0].policy_spans
    assert {version for version, _, _ in spans} == {"e" * 64}
