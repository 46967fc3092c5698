"""Policy-gradient training on committed datasets."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from trainer_world import QUICKSTART, World, episodes

from contracts.artifacts import Artifact, artifact_exists, list_artifacts, open_artifact
from trainer.algorithms.base import Tokens
from trainer.algorithms.corrections import Corrections
from trainer.config import SNAPSHOT
from trainer.data import make_batch, read_sequences
from trainer.errors import OffPolicyRefused, TrainingDataError
from trainer.experience import member_advantages, member_rewards
from trainer.export import load_checkpoint
from trainer.losses import PolicyLoss, policy_loss
from trainer.metrics import Record
from trainer.model import score
from trainer.result import TrainResult
from trainer.rl import minibatches
from trainer.run import run_job


def loss_of(logprobs: Tensor, old: Tensor, sampler: Tensor, advantages: Tensor) -> PolicyLoss:
    """Of one sequence, by the quickstart's algorithm."""
    owners = torch.zeros(len(old), dtype=torch.int64)
    tokens = Tokens(logprobs, old, sampler, advantages, owners, torch.tensor([float(len(old))]))
    return policy_loss(QUICKSTART, Corrections(), tokens)


def base(world: World) -> TrainResult:
    return run_job(world.sft_job("base"))


def own_dataset(world: World, checkpoint: TrainResult, groups: int = 4, size: int = 4) -> Artifact:
    """Groups of right copies and wrong ones, with the checkpoint's own logprobs as the sampler's; reward 1 for every
    second member.
    """
    rows, members = [], []
    for number, (ids, roles) in enumerate(episodes(world, groups)):
        for sample in range(size):
            wrong = sample % 2
            tokens = list(ids)
            if wrong:
                tokens[roles.index(1)] = ids[0]
            name = {"episode_id": f"e{number}-{sample}", "group_id": f"g{number}"}
            reward = 1.0 - wrong
            members.append({**name, "reward": reward, "kept": True})
            rows.append(
                {
                    **name,
                    "group_index": number,
                    "token_ids": tokens,
                    "token_role": roles,
                    "reward": reward,
                    "logprobs": [None] * len(tokens),
                    "policy_versions": [checkpoint.checkpoint.digest],
                }
            )
    for row, values in zip(rows, policy_logprobs(world, checkpoint, rows), strict=True):
        row["logprobs"] = values
    members.append({"episode_id": "left-out", "group_id": "g0", "reward": 0.5, "kept": False})
    members.append({"episode_id": "infra", "group_id": "g0", "reward": None, "kept": False})
    return world.dataset(rows, members)


@torch.no_grad()
def policy_logprobs(world: World, result: TrainResult, rows: list[dict[str, Any]]) -> list[list[float | None]]:
    parameters = load_checkpoint(open_artifact(world.store, result.checkpoint).directory())
    found = []
    for sequence in read_sequences(pa.Table.from_pylist(rows), "rows", world.vocabulary, 64):
        own = score(parameters.leaves, parameters.config, make_batch([sequence])).logprobs.tolist()
        values: list[float | None] = [None] * sequence.length
        for position, value in zip(sequence.scored.tolist(), own, strict=True):
            values[position] = value
        found.append(values)
    return found


def mean_logprob(world: World, result: TrainResult, dataset: Artifact, rewarded: bool) -> float:
    rows = [row for row in dataset.table("train.parquet").to_pylist() if (row["reward"] == 1.0) == rewarded]
    values = [v for row in policy_logprobs(world, result, rows) for v in row if v is not None]
    return sum(values) / len(values)


def test_rewarded_tokens_become_likelier_than_the_others(world: World) -> None:
    start = base(world)
    dataset = own_dataset(world, start)
    after = run_job(world.rl_job("grpo", dataset, start.checkpoint, start.trainer_state))
    before = mean_logprob(world, start, dataset, True) - mean_logprob(world, start, dataset, False)
    assert mean_logprob(world, after, dataset, True) - mean_logprob(world, after, dataset, False) > before + 0.01
    assert after.metrics["step"] == start.metrics["step"] + 2
    assert after.metrics["sampler_mismatch_max"] < 1e-5
    assert after.metrics["tis_mean"] == pytest.approx(1.0, abs=1e-4)


def test_learning_rate_zero_leaves_every_code_and_scale(world: World) -> None:
    start = base(world)
    job = world.rl_job("zero", own_dataset(world, start), start.checkpoint, start.trainer_state, learning_rate=0.0)
    assert run_job(job).checkpoint.digest == start.checkpoint.digest


def test_the_same_job_twice_and_any_microbatch_give_the_same_policy(world: World) -> None:
    start = base(world)
    dataset = own_dataset(world, start)

    def train(name: str, **config: Any) -> TrainResult:
        return run_job(world.rl_job(name, dataset, start.checkpoint, start.trainer_state, **config))

    first, second, small = train("a"), train("b"), train("c", microbatch_tokens=64)
    assert first.checkpoint.digest == second.checkpoint.digest
    assert first.trainer_state.digest == second.trainer_state.digest
    assert mean_logprob(world, small, dataset, True) == pytest.approx(
        mean_logprob(world, first, dataset, True), abs=1e-3
    )


def test_the_optimizer_state_carries_over_between_iterations(world: World) -> None:
    start = base(world)
    dataset = own_dataset(world, start)
    first = run_job(world.rl_job("one", dataset, start.checkpoint, start.trainer_state))
    second = run_job(world.rl_job("two", dataset, first.checkpoint, first.trainer_state))
    state = open_artifact(world.store, second.trainer_state)
    assert state.json("state.json")["optimizer"] == "adamw"
    from safetensors.torch import load_file

    assert float(load_file(state.path("state.safetensors"))["adamw.step"]) == 4.0


def test_a_state_of_another_checkpoint_is_refused(world: World) -> None:
    start = base(world)
    dataset = own_dataset(world, start)
    after = run_job(world.rl_job("one", dataset, start.checkpoint, start.trainer_state))
    with pytest.raises(TrainingDataError, match="does not quantize to checkpoint"):
        run_job(world.rl_job("two", dataset, after.checkpoint, start.trainer_state))


def test_an_empty_dataset_publishes_the_same_weights_marked_as_skipped(world: World) -> None:
    start = base(world)
    result = run_job(world.rl_job("empty", world.dataset([], []), start.checkpoint, start.trainer_state))
    assert result.metrics["skipped"] is True
    assert result.checkpoint.digest == start.checkpoint.digest
    assert result.checkpoint.key != start.checkpoint.key


def test_an_episode_without_a_reward_is_refused_by_name(world: World) -> None:
    start = base(world)
    whole = own_dataset(world, start)
    rows = whole.table("train.parquet").to_pylist()
    members = [row for row in whole.table("members.parquet").to_pylist() if row["episode_id"] != "e1-1"]
    with pytest.raises(TrainingDataError, match="e1-1"):
        run_job(world.rl_job("lost", world.dataset(rows, members), start.checkpoint, start.trainer_state))


def test_a_small_effective_sample_size_is_refused_before_anything_is_made(world: World) -> None:
    start = base(world)
    whole = own_dataset(world, start)
    rows, members = (whole.table(f"{name}.parquet").to_pylist() for name in ("train", "members"))
    for row in rows[::2]:
        row["logprobs"] = [None if value is None else value - 2.0 for value in row["logprobs"]]
    job = world.rl_job("far", world.dataset(rows, members), start.checkpoint, start.trainer_state)
    with pytest.raises(OffPolicyRefused, match=r"is 0\.\d{3} of their tokens, at least 0\.9 is required"):
        run_job(job.model_copy(update={"min_effective_sample_size": 0.9}))
    for kind in ("checkpoint", "trainer_state"):
        assert not artifact_exists(world.store, kind, job.key)
    assert not list(list_artifacts(world.store, SNAPSHOT))
    result = run_job(job.model_copy(update={"min_effective_sample_size": 0.2}))
    assert 0.2 < result.metrics["effective_sample_size"] < 0.9


def test_metrics_tell_each_optimizer_step(world: World) -> None:
    start, seen = base(world), list[Record]()
    run_job(world.rl_job("m", own_dataset(world, start), start.checkpoint, start.trainer_state), [seen.append])
    steps = [record for record in seen if "loss" in record]
    assert len(steps) == 2
    assert {
        "grad_norm",
        "lr",
        "tokens",
        "seconds",
        "clip_fraction",
        "dual_clip_fraction",
        "bounded_fraction",
        "tis_mean",
        "entropy",
        "loss",
    } <= set(steps[0])
    assert seen[0]["reward_mean"] == pytest.approx(0.5) and seen[0]["members"] == 17


def advantages_of(members: pa.Table, seed: int | None) -> dict[str, float]:
    """Reward minus group mean, by episode."""
    found = member_advantages(members, member_rewards(members, seed), "group_mean")
    return dict(zip(members.column("episode_id").to_pylist(), found.tolist(), strict=True))


def test_members_left_out_count_in_the_baseline_and_permuting_keeps_each_groups_rewards(world: World) -> None:
    members = own_dataset(world, base(world)).table("members.parquet").slice(0, 17)
    plain, permuted = advantages_of(members, None), advantages_of(members, 3)
    assert plain["e0-0"] == pytest.approx(1 - 2.5 / 5)
    assert plain["e1-0"] == pytest.approx(0.5)
    for group in ("e1-", "e2-"):
        pick = [name for name in plain if name.startswith(group)]
        assert sorted(plain[name] for name in pick) == sorted(permuted[name] for name in pick)
    assert plain != permuted and permuted == advantages_of(members, 3)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5)), min_size=1, max_size=30))
def test_advantages_of_a_group_sum_to_zero(pairs: list[tuple[int, float]]) -> None:
    own = {group: [reward for other, reward in pairs if other == group] for group, _ in pairs}
    members = [
        {"episode_id": str(index), "group_id": str(group), "reward": reward, "group_reward_mean": fmean(own[group])}
        for index, (group, reward) in enumerate(pairs)
    ]
    values = advantages_of(pa.Table.from_pylist(members), None)
    for group in own:
        assert abs(sum(value for index, value in values.items() if pairs[int(index)][0] == group)) < 1e-9


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -0.5, 2.0])
    loss_of(logprobs, logprobs.detach(), logprobs.detach(), advantages).loss.backward()
    torch.testing.assert_close(logprobs.grad, -advantages)


@given(st.floats(-2, 2), st.sampled_from([-1.0, 1.0]))
def test_clipping_stops_the_gradient_only_where_it_would_go_further(shift: float, advantage: float) -> None:
    logprob = torch.tensor([-1.0 + shift], requires_grad=True)
    old = torch.tensor([-1.0])
    loss = loss_of(logprob, old, old, torch.tensor([advantage]))
    loss.loss.backward()
    ratio = math.exp(float((logprob.detach() - old)[0]))
    clipped = ratio > 1.28 if advantage > 0 else ratio < 0.8
    dual_clipped = advantage < 0 and ratio > 3
    assert (float(logprob.grad[0]) == 0.0) == (clipped or dual_clipped)
    assert (int(loss.clipped), int(loss.dual_clipped)) == (int(clipped), int(dual_clipped))


def test_importance_correction_is_capped() -> None:
    old = torch.tensor([-1.0, -1.0])
    sampler = torch.tensor([-1.0 - math.log(1.5), -1.0 - math.log(9.0)])
    loss = loss_of(old.clone().requires_grad_(), old, sampler, torch.ones(2))
    assert float(loss.loss.detach()) == pytest.approx(-(1.5 + 2.0))


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 8), st.integers(0, 99))
def test_minibatches_contain_whole_groups_once(groups: list[int], count: int, seed: int) -> None:
    parts = minibatches(groups, count, seed)
    assert sorted(row for part in parts for row in part) == list(range(len(groups)))
    assert all(parts) and len(parts) == min(count, len(set(groups)))
    homes = [{groups[row] for row in part} for part in parts]
    assert sum(len(home) for home in homes) == len(set(groups))
