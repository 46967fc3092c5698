"""Hosted episodes in real sandboxes: they are what a rollout of the same seed is, and every misuse is one error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from contracts.episodes import Outcome
from contracts.errors import ConfigError
from contracts.pb import bridge_pb2 as pb
from envd.local import LocalEnvd
from inference.bridge import replay
from inference.bridge.client import Bridge, BridgeClient, Finish
from inference.bridge.hosted import acting
from inference.bridge.journal import Journal
from inference.bridge.registry import Bounds
from inference.bridge.serve import limits_of
from inference.bridge.turns import HOSTED_LOSSES
from inference.engines.base import Piece, SamplingParams, empty_piece
from inference.engines.builtin import BuiltinEngine
from inference.errors import EngineStopped
from inference.rollouts import workspace
from inference.rollouts.environment import EpisodeEnvironment
from ops.bridge_hosting import open_hosting
from resources.experiment import load_experiment
from tests.bridge.bridge_harness import KEY, Client, builtin_bridge, ids, new_id, refused
from tests.bridge.hosted_parts import (
    SCRIPTS,
    TASKS,
    FailingGrader,
    StreamedScript,
    check_equal,
    hosted_bridge,
    live_sandboxes,
    nothing_left,
    played,
    rolled_out,
    rows_of,
    settings,
)
from tests.bridge.scripted_bridge import looped
from tests.inference.conftest import write_checkpoint
from tests.rollouts.rollouts_script import byte_tokenizer

pytestmark = pytest.mark.slow

TASK = "task-000"
QUICKSTART = Path(__file__).parents[2] / "experiments" / "quickstart.yaml"


@pytest.fixture(scope="module")
def envd() -> Iterator[str]:
    with LocalEnvd() as server:
        yield server.address


def script(name: str = "marks", pause_s: float = 0.0) -> StreamedScript:
    return StreamedScript(byte_tokenizer(), SCRIPTS[name], pause_s)


def connect(folder: Path, **options: Any) -> BridgeClient:
    return BridgeClient(f"unix:{folder / 'b.sock'}", **options)


@looped
async def test_hosted_episode_is_the_rollout_of_its_seed(envd: str, tmp_path: Path) -> None:
    engine = script()
    async with hosted_bridge(engine, envd, tmp_path), connect(tmp_path) as client:
        assert (await client.info()).hosted_tasks == len(TASKS)
        for seed, reward in ((1, 1.1), (2, 0.1)):
            episode = await client.start_task(TASK, seed=seed)
            record = await played(episode)
            check_equal(record, await rolled_out(engine, envd, TASKS[TASK], seed, settings(), byte_tokenizer()))
            reply = episode.turns[-1].reply
            assert reply is not None and reply.reward == pytest.approx(reward) and reply.verdict == "completed"
            first = episode.turns[0].reply
            assert first is not None and [each.name for each in first.results] == ["exec", "read"]
            assert not first.done and first.results[1].text.endswith("# 0")
            assert episode.turns[1].observation_ids.tolist() == first.observation_ids.tolist() != []
    await nothing_left(envd)


@looped
async def test_hosted_episode_of_the_builtin_engine_is_its_rollout(envd: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    config = settings(max_tokens=250, max_turn_tokens=110, max_format_errors=3, temperature=0.9)
    policy = write_checkpoint(tmp_path / "p", 0, vocab_size=tokenizer.vocabulary_size)
    engine = BuiltinEngine(policy, "v1", threads=1)
    turns, outcomes = [], set()
    hosted = hosted_bridge(engine, envd, tmp_path, tokenizer=tokenizer, limits=limits_of(policy), config=config)
    async with hosted, connect(tmp_path) as client:
        for seed in range(8):
            record = await played(await client.start_task(TASK, seed=seed))
            check_equal(record, await rolled_out(engine, envd, TASKS[TASK], seed, config, tokenizer))
            row, _, _ = rows_of(record)
            turns.append(row["turns"])
            outcomes.add(row["outcome"])
    await engine.close()
    assert len(outcomes) > 1


@looped
async def test_hosted_episode_under_a_grammar_is_its_rollout_with_supports(envd: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    config = settings(max_tokens=420, max_turn_tokens=170, temperature=1.1, grammar=True, top_p=0.9)
    policy = write_checkpoint(tmp_path / "p", 0, vocab_size=tokenizer.vocabulary_size)
    (policy / "tokenizer.json").write_text(tokenizer._text.to_str())
    engine = BuiltinEngine(policy, "v1", threads=1)
    hosted = hosted_bridge(engine, envd, tmp_path, tokenizer=tokenizer, limits=limits_of(policy), config=config)
    async with hosted, connect(tmp_path) as client:
        for seed in range(4):
            episode = await client.start_task(TASK, seed=seed)
            record = await played(episode)
            check_equal(record, await rolled_out(engine, envd, TASKS[TASK], seed, config, tokenizer))
            _, sequence, _ = rows_of(record)
            assert sequence["supports"] is not None
            assert all(turn.supports is not None and turn.forced is not None for turn in episode.turns)
    await engine.close()


@looped
async def test_bad_messages_of_hosted_episodes_are_named(envd: str, tmp_path: Path) -> None:
    def start(**fields: Any) -> pb.StartEpisodeRequest:
        named = pb.HostedTask(task_id=fields.pop("task", TASK), task_digest=fields.pop("digest", ""))
        return pb.StartEpisodeRequest(episode_id=fields.pop("name", new_id()), hosted=named, **fields)

    bounds = Bounds(max_episodes=1)
    async with hosted_bridge(script(), envd, tmp_path, bounds=bounds) as bridge:
        async with grpc.aio.insecure_channel(bridge.address) as channel:
            client, name = Client(channel), new_id()
            for bad, error, words in (
                (start(task="task-0"), "UnknownTask", "did you mean 'task-00"),
                (start(digest="0" * 64), "UnknownTask", "has digest"),
                (start(prompt_ids=ids([1])), "BadMessage", "its task makes the prompt"),
                (start(labels={"task_id": "x"}), "BadMessage", "labels['task_id']"),
                (start(grammar="{}"), "BadMessage", "those of the bridge's experiment"),
                (start(sampling=pb.Sampling(stop_token_ids=[1])), "BadMessage", "stop_token_ids"),
                (start(sampling=pb.Sampling(max_tokens=301)), "BadMessage", "at most 300"),
            ):
                async with refused("NOT_FOUND" if error == "UnknownTask" else "INVALID_ARGUMENT", error, words):
                    await client.start(bad)
            state = await client.start(start(name=name))
            assert state.prompt_ids and (await client.start(start(name=name))).digest == state.digest
            async with refused("RESOURCE_EXHAUSTED", "TooManyEpisodes", "--max-episodes"):
                await client.start(start())
            async with refused("INVALID_ARGUMENT", "BadMessage", "the bridge plays its environment"):
                await client.step(name, 1, [5])
            async with refused("INVALID_ARGUMENT", "BadMessage", "its verdict"):
                await client.end(name, reward=1.0)
            for step in range(1, 6):
                ended = [each async for each in client.step_call(name, step)][-1].end
            assert ended.done and ended.outcome == Outcome.COMPLETED
            again = [each async for each in client.step_call(name, 5)][-1].end
            assert again == ended
            async with refused("FAILED_PRECONDITION", "EpisodeDone", "over (completed) after 5 steps"):
                await client.step(name, 6)
            await client.end(name)
    await nothing_left(envd)


@looped
async def test_episode_whose_grade_fails_is_graded_when_its_last_step_is_asked_for_again(
    envd: str, tmp_path: Path
) -> None:
    grader, options = FailingGrader(2), {"journal": tmp_path / "journal"}
    name, start = new_id(), pb.HostedTask(task_id=TASK)
    async with hosted_bridge(script(), envd, tmp_path, grader=grader, **options) as bridge:
        async with grpc.aio.insecure_channel(bridge.address) as channel:
            client = Client(channel)
            await client.start(pb.StartEpisodeRequest(episode_id=name, hosted=start, sampling=pb.Sampling(seed=1)))
            for step in range(1, 5):
                await client.step(name, step)
            async with refused("UNAVAILABLE", "GradingFailed", "verifier is away; ask for its last step again"):
                await client.step(name, 5)
            async with refused("UNAVAILABLE", "GradingFailed"):
                await client.step(name, 5)
    async with hosted_bridge(script(), envd, tmp_path, grader=grader, **options) as bridge:
        async with grpc.aio.insecure_channel(bridge.address) as channel:
            client = Client(channel)
            ended = [each async for each in client.step_call(name, 5)][-1].end
            assert ended.done and ended.reward == pytest.approx(1.1) and ended.verdict == "completed"
            await client.end(name)
    assert grader.asked == 3, "a grade that is known is not made again"
    await nothing_left(envd)


@looped
async def test_bridge_that_hosts_nothing_says_so(tmp_path: Path) -> None:
    policy = write_checkpoint(tmp_path / "p", 0)
    async with builtin_bridge(policy, tmp_path) as (client, _, _):
        message = pb.StartEpisodeRequest(episode_id=new_id(), hosted=pb.HostedTask(task_id=TASK))
        async with refused("INVALID_ARGUMENT", "BadMessage", "hosts no tasks: start it with `triplane bridge"):
            await client.start(message)


@looped
async def test_expired_ended_and_aborted_episodes_leave_no_sandbox(envd: str, tmp_path: Path) -> None:
    bounds = Bounds(lease_s=1.0)
    async with hosted_bridge(script("reads"), envd, tmp_path, bounds=bounds, journal=tmp_path / "j"):
        async with connect(tmp_path) as client:
            left = await client.start_task(TASK)
            await left.step()
            ended = await client.start_task(TASK)
            await ended.step()
            assert await live_sandboxes(envd) == 2
            left.release()
            row, _, about = rows_of(await ended.end())
            assert row["outcome"] == Outcome.ABORTED and about["reward"] is None and row["turns"] == 1
            await nothing_left(envd)
            assert (await client.state(left.id)).phase == "expired"
    journal = Journal(tmp_path / "j")
    assert not any(each.is_open for each in replay.replay(journal.read()).values()), "an expired one is remembered"
    journal.close()


@looped
async def test_keys_see_their_own_hosted_episodes_only(envd: str, tmp_path: Path) -> None:
    other = "o" * 16
    async with hosted_bridge(script(), envd, tmp_path, keys=(KEY, other)):
        async with connect(tmp_path, key=KEY) as mine, connect(tmp_path, key=other) as theirs:
            first = await mine.start_task(TASK, seed=1, episode_id="e" * 32)
            second = await theirs.start_task(TASK, seed=2, episode_id="e" * 32)
            records = await asyncio.gather(played(first), played(second))
            diffs = [rows_of(record)[0]["final_diff"] for record in records]
            assert b"return 2" in diffs[0] and b"return 3" in diffs[1]


@looped
async def test_client_that_goes_away_leaves_the_tools_running(envd: str, tmp_path: Path) -> None:
    async with hosted_bridge(script("hangs"), envd, tmp_path):
        async with connect(tmp_path) as client:
            episode = await client.start_task(TASK)
            stepping = asyncio.create_task(episode.step())
            while not await live_sandboxes(envd):
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            stepping.cancel()
            await asyncio.gather(stepping, return_exceptions=True)
            name = episode.release()
        async with connect(tmp_path) as client:
            episode = await client.attach(name, ())
            row, _, _ = rows_of(await played(episode))
        assert row["outcome"] == Outcome.COMPLETED
        assert row["final_diff"].count(b"+begun") == row["final_diff"].count(b"+ended") == 1


@looped
async def test_cancelled_turn_ends_a_hosted_episode_as_aborted(envd: str, tmp_path: Path) -> None:
    async with hosted_bridge(script(pause_s=0.1), envd, tmp_path) as bridge:
        async with grpc.aio.insecure_channel(bridge.address) as channel:
            client, name = Client(channel), new_id()
            await client.start(pb.StartEpisodeRequest(episode_id=name, hosted=pb.HostedTask(task_id=TASK)))
            call = client.step_call(name, 1)
            await call.read()
            await client.cancel(name, 1)
            while not (event := await call.read()).HasField("end"):
                pass
            assert (event.end.finish, event.end.outcome) == (pb.CANCELLED, Outcome.ABORTED) and event.end.done


@looped
async def test_next_bridge_goes_on_with_the_same_sandbox(envd: str, tmp_path: Path) -> None:
    async with connect(tmp_path) as client:
        async with hosted_bridge(script(), envd, tmp_path, journal=tmp_path / "j"):
            episode = await client.start_task(TASK, seed=1)
            await episode.step()
            await episode.step()
        assert await live_sandboxes(envd) == 1, "the sandbox of an open episode stays"
        async with hosted_bridge(script(), envd, tmp_path, journal=tmp_path / "j"):
            record = await played(episode)
    expected = await rolled_out(script(), envd, TASKS[TASK], 1, settings(), byte_tokenizer())
    check_equal(record, expected)
    await nothing_left(envd)


@looped
async def test_next_bridge_finds_sandboxes_on_a_list_of_servers(envd: str, tmp_path: Path) -> None:
    with LocalEnvd() as second:
        servers = f"{envd},{second.address}"
        async with connect(tmp_path) as client:
            async with hosted_bridge(script(), servers, tmp_path, journal=tmp_path / "j"):
                episodes = [await client.start_task(TASK, seed=seed) for seed in (1, 2)]
                for episode in episodes:
                    await episode.step()
                assert [await live_sandboxes(each) for each in (envd, second.address)] != [0, 0]
            async with hosted_bridge(script(), servers, tmp_path, journal=tmp_path / "j"):
                records = [await played(episode) for episode in episodes]
        for record in records:
            row, _, about = rows_of(record)
            assert row["final_diff"].count(b"+0\n+1\n+2\n") == 1 and about["reward"] is not None
        for server in (envd, second.address):
            await nothing_left(server)


@looped
async def test_calls_whose_answers_are_not_kept_any_more_are_not_sent_again(
    envd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect(tmp_path) as client:
        async with hosted_bridge(script("hangs"), envd, tmp_path, journal=tmp_path / "j"):
            episode = await client.start_task(TASK)
            stepping = asyncio.create_task(episode.step())
            while not await live_sandboxes(envd):
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.0)
        monkeypatch.setattr(acting, "ANSWERS_KEPT_S", 0.5)
        async with hosted_bridge(script("hangs"), envd, tmp_path, journal=tmp_path / "j"):
            turn = await stepping
            assert turn.reply is not None and turn.reply.outcome == Outcome.INFRA_ERROR
            assert "not sent again" in turn.reply.failure and turn.reply.reward is None
    await nothing_left(envd)


@looped
async def test_episode_whose_sandbox_ends_while_the_bridge_is_away_has_no_reward(
    envd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (acting, workspace):
        monkeypatch.setattr(module, "LIFETIME_MARGIN_S", 0.0)
    options: Any = {"config": settings(episode_timeout_s=8.0), "journal": tmp_path / "j"}
    async with connect(tmp_path) as client:
        async with hosted_bridge(script(), envd, tmp_path, **options):
            episode = await client.start_task(TASK, seed=1)
            await episode.step()
            assert not episode.done
        await nothing_left(envd)
        async with hosted_bridge(script(), envd, tmp_path, **options):
            turn = await episode.step()
            assert turn.finish == Finish.DEADLINE and turn.reply is not None
            assert turn.reply.outcome == Outcome.INFRA_ERROR and turn.reply.reward is None
            assert "its sandbox has ended with its lifetime" in turn.reply.failure


@looped
async def test_episode_whose_sandbox_ends_while_its_final_state_is_taken_has_no_reward(
    envd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (acting, workspace):
        monkeypatch.setattr(module, "LIFETIME_MARGIN_S", 0.0)
    taken = EpisodeEnvironment.final_state

    async def taken_late(self: EpisodeEnvironment, *arguments: Any) -> bytes:
        await nothing_left(envd)
        return await taken(self, *arguments)

    monkeypatch.setattr(EpisodeEnvironment, "final_state", taken_late)
    options: Any = {"config": settings(episode_timeout_s=12.0)}
    async with hosted_bridge(script(), envd, tmp_path, **options), connect(tmp_path) as client:
        episode = await client.start_task(TASK, seed=1)
        while not episode.done:
            turn = await episode.step()
        assert turn.finish == Finish.STOP and turn.reply is not None, "the episode itself was over in time"
        assert turn.reply.outcome == Outcome.INFRA_ERROR and turn.reply.reward is None
        assert "its sandbox has ended with its lifetime" in turn.reply.failure


class LossyScript(StreamedScript):
    """Is lost after two more tokens, `losses` times: by an error, or by an abort as of a server that updates."""

    losses, aborts = 0, False

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
        given = 0
        async for piece in super().stream(prompt_ids, params):
            if given == 2 and self.losses:
                self.losses -= 1
                if self.aborts:
                    yield empty_piece("abort")
                    return
                raise EngineStopped("lost")
            given += 1
            yield piece


@pytest.mark.parametrize("aborts", [False, True])
@looped
async def test_turns_go_on_after_their_engine_was_lost(
    envd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aborts: bool
) -> None:
    monkeypatch.setattr("inference.bridge.turns.FIRST_PAUSE_S", 0.01)
    engine = LossyScript(byte_tokenizer(), SCRIPTS["marks"])
    engine.aborts = aborts
    async with hosted_bridge(engine, envd, tmp_path), connect(tmp_path) as client:
        episode = await client.start_task(TASK, seed=1)
        while not episode.done:
            engine.losses = HOSTED_LOSSES
            await episode.step()
        assert engine.losses == HOSTED_LOSSES - 2, "the last turn has five tokens"
        engine.losses = 0
        expected = await rolled_out(engine, envd, TASKS[TASK], 1, settings(), byte_tokenizer())
        check_equal(await episode.end(), expected)
        episode = await client.start_task(TASK, seed=1)
        engine.losses = HOSTED_LOSSES + 1
        turn = await episode.step()
        assert turn.reply is not None and turn.reply.outcome == Outcome.INFRA_ERROR
        assert turn.finish == Finish.ENGINE_LOST and len(turn.token_ids) == 2 * (HOSTED_LOSSES + 1)
    await nothing_left(envd)


def test_plain_client_plays_hosted_episodes(envd: str, tmp_path: Path) -> None:
    def play() -> tuple[int, float | None]:
        with Bridge(f"unix:{tmp_path / 'b.sock'}") as bridge, bridge.start_task(TASK, seed=1) as episode:
            while not episode.done:
                turn = episode.step()
            assert turn.reply is not None
            return len(episode.turns), turn.reply.reward

    async def run() -> None:
        async with hosted_bridge(script(), envd, tmp_path):
            turns, reward = await asyncio.to_thread(play)
            assert turns == 5 and reward == pytest.approx(1.1)

    asyncio.run(run())


def test_an_experiment_that_records_routing_is_refused() -> None:
    experiment = load_experiment(QUICKSTART, ["rollouts.record_routing=true"])
    nothing: Any = None

    async def open_it() -> None:
        async with open_hosting(experiment, nothing, nothing, nothing, nothing):
            pass

    with pytest.raises(ConfigError, match="hosted episodes record no routing"):
        asyncio.run(open_it())
