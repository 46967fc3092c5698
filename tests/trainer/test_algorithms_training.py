"""Every algorithm in the training loop: any cut gives one gradient, steps without tokens are skipped, PPO resumes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_trainer_balance import CONFIG, EXPERIENCE, ROWS, Cut
from test_trainer_rl import base, own_dataset
from torch import Tensor
from trainer_world import QUICKSTART, World, backend_of

from contracts.artifacts import Artifact, open_artifact
from trainer.algorithms.advantages import generalized_advantages
from trainer.algorithms.ppo import Ppo
from trainer.config import RlConfig
from trainer.critic import Critic
from trainer.data import make_batch
from trainer.errors import TrainingDataError
from trainer.metrics import Record
from trainer.mismatch import mismatch_metrics
from trainer.model import score
from trainer.parameters import Parameters, draw_masters
from trainer.result import TrainResult
from trainer.rl import Start, accumulate
from trainer.rl_metrics import Totals
from trainer.run import run_job

KINDS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo")
VARIANTS: list[dict[str, Any]] = [
    *({"kind": kind} for kind in KINDS),
    {"kind": "grpo", "aggregation": "token", "dual_clip": 3.0, "kl_coefficient": 0.04},
    {"kind": "dapo", "aggregation": "sequence"},
    {"kind": "ppo", "aggregation": "constant"},
]
CORRECTIONS = {
    "ratio_mask": {"low": 0.5, "high": 2.0},
    "probability_gap": {},
    "sequence_rejection": {"low": 0.8, "high": 1.25},
    "veto": 0.3,
}
Gradients = tuple[Totals, list[Tensor]]


@pytest.fixture(scope="module")
def parameters() -> Parameters:
    torch.set_num_threads(1)
    return Parameters.from_masters(CONFIG, draw_masters(CONFIG, 0))


def noisy_start(parameters: Parameters) -> Start:
    """Starting numbers near the policy's own, so that ratios, masks and clips vary."""
    draw = np.random.default_rng(1)
    with torch.no_grad():
        own = [score(parameters.leaves, CONFIG, make_batch([each])).logprobs for each in EXPERIENCE.sequences]
    old = [values + torch.from_numpy(draw.normal(0, 0.3, len(values))).float() for values in own]
    numbers = [[torch.from_numpy(draw.normal(size=len(v))).float() for v in own] for _ in range(3)]
    assert EXPERIENCE.advantages is not None
    alike = [a.expand(len(o)) for a, o in zip(EXPERIENCE.advantages, old, strict=True)]
    return Start(old, alike, numbers[1], numbers[2])


def gradients(parameters: Parameters, variant: dict[str, Any], parts: Cut) -> Gradients:
    """Sums and gradients of one optimizer step, cut into `parts`; the value head's is the last."""
    config = RlConfig(algorithm=variant, corrections=CORRECTIONS)
    start = noisy_start(parameters)
    draw = torch.Generator().manual_seed(0)
    sampler = [values + 0.2 * torch.randn(len(values), generator=draw) for values in start.logprobs]
    experience = EXPERIENCE.__class__(**{**EXPERIENCE.__dict__, "sampler_logprobs": sampler})
    critic = None
    if isinstance(config.algorithm, Ppo):
        saved = Critic(config.algorithm, CONFIG["hidden_size"], 0.9, 0.95, {}).state()
        saved["critic.weight"] = 0.1 * torch.randn(CONFIG["hidden_size"], generator=draw)
        critic = Critic(config.algorithm, CONFIG["hidden_size"], 0.9, 0.95, saved)
    parameters.clear_gradients()
    totals = accumulate(config, backend_of(parameters), experience, start, parts, critic)
    found = [buffer.gradient.clone() for buffer in parameters.buffers]
    return totals, found if critic is None else [*found, critic._buffer.gradient.clone()]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_microbatch_size_does_not_change_the_gradient(parameters: Parameters, variant: dict[str, Any]) -> None:
    whole, expected = gradients(parameters, variant, [list(range(ROWS))])
    assert any(bool(each.any()) for each in expected) and 0 < whole.masked < whole.tokens
    order = np.random.default_rng(0).permutation(ROWS).tolist()
    totals, found = gradients(parameters, variant, [order[:1], order[1:6], order[6:]])
    assert totals.loss == pytest.approx(whole.loss, rel=1e-5, abs=1e-6)
    assert (totals.masked, totals.masked_by) == (whole.masked, whole.masked_by)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=5e-6)  # float32 sums, in an order that the CPU chooses


def former_loss(logprobs: Tensor, old: Tensor, sampler: Tensor, advantages: Tensor) -> Tensor:
    """The policy loss of RL_VERSION 2, whose operations the quickstart's algorithm must repeat in their order."""
    ratio = (logprobs - old).clamp(-20.0, 20.0).exp()
    plain = ratio * advantages
    least = torch.minimum(plain, ratio.clamp(1 - 0.2, 1 + 0.28) * advantages)
    kept = torch.where(advantages < 0, torch.maximum(least, 3.0 * advantages), least)
    return (-((old - sampler).exp().clamp(max=2.0) * kept)).sum()


def test_the_quickstarts_gradient_has_the_bits_of_the_former_loss(parameters: Parameters) -> None:
    start = noisy_start(parameters)
    config = RlConfig(algorithm=QUICKSTART)
    parameters.clear_gradients()
    accumulate(config, backend_of(parameters), EXPERIENCE, start, [list(range(ROWS))])
    found = [buffer.gradient.clone() for buffer in parameters.buffers]
    parameters.clear_gradients()
    batch = make_batch(EXPERIENCE.sequences)
    assert EXPERIENCE.advantages is not None
    loss = former_loss(
        score(parameters.leaves, CONFIG, batch).logprobs,
        torch.cat(start.logprobs),
        torch.cat(EXPERIENCE.sampler_logprobs),
        EXPERIENCE.advantages[batch.owners],
    )
    (loss / len(batch.owners)).backward()
    for buffer, ours in zip(parameters.buffers, found, strict=True):
        assert torch.equal(buffer.gradient, ours), buffer.name


def train(
    world: World, name: str, dataset: Artifact, start: TrainResult, **config: Any
) -> tuple[TrainResult, list[Record]]:
    seen: list[Record] = []
    return run_job(world.rl_job(name, dataset, start.checkpoint, start.trainer_state, **config), [seen.append]), seen


@pytest.mark.parametrize("kind", KINDS)
def test_every_algorithm_trains_and_reports(kind: str, world: World) -> None:
    start = base(world)
    result, seen = train(world, kind, own_dataset(world, start), start, algorithm={"kind": kind})
    steps = [record for record in seen if "loss" in record]
    assert len(steps) == 2 and all(record["grad_norm"] > 0 for record in steps)
    assert result.checkpoint.digest != start.checkpoint.digest
    for name in ("mismatch_k1", "mismatch_k3", "mismatch_max_dp", "effective_sample_size"):
        assert result.metrics[name] == seen[0][name]
    for name in ("masked_fraction", "ratio_mask_fraction", "veto_fraction", "clip_fraction", "entropy"):
        assert name in result.metrics and name in steps[0]
    assert abs(seen[0]["mismatch_k3"]) < 1e-9 and seen[0]["effective_sample_size"] == pytest.approx(1.0)


def shifted_dataset(world: World, start: TrainResult, groups: tuple[str, ...], shift: float) -> Artifact:
    """The sampler's log probabilities of these groups differ from the trainer's by `shift`."""
    whole = own_dataset(world, start)
    rows = whole.table("train.parquet").to_pylist()
    for row in rows:
        if row["group_id"] in groups:
            row["logprobs"] = [None if value is None else value + shift for value in row["logprobs"]]
    return world.dataset(rows, whole.table("members.parquet").to_pylist())


def test_a_step_without_any_token_is_skipped_counted_and_reported(world: World) -> None:
    start = base(world)
    mask = {"ratio_mask": {"low": 0.5, "high": 5.0}}
    some = shifted_dataset(world, start, ("g0", "g1"), -4.0)
    result, seen = train(world, "some", some, start, optimizer_steps=4, corrections=mask)
    lost = [record for record in seen if record.get("skipped_step")]
    assert len(lost) == 2 and all(record["masked_fraction"] == 1.0 for record in lost)
    assert result.metrics["skipped_steps"] == 2 and result.metrics["masked_fraction"] == pytest.approx(0.5)
    assert result.metrics["step"] == start.metrics["step"] + 2 and result.metrics["skipped"] is False
    every = shifted_dataset(world, start, ("g0", "g1", "g2", "g3"), -4.0)
    result, seen = train(world, "every", every, start, corrections=mask)
    assert result.metrics["skipped"] is True and result.metrics["skipped_steps"] == 2
    assert result.checkpoint.digest == start.checkpoint.digest
    assert not any("loss" in record for record in seen)


def test_a_group_of_one_is_refused_by_name_for_leave_one_out(world: World) -> None:
    start = base(world)
    whole = own_dataset(world, start)
    rows = [
        row for row in whole.table("train.parquet").to_pylist() if row["episode_id"] not in ("e2-1", "e2-2", "e2-3")
    ]
    members = [row for row in whole.table("members.parquet").to_pylist() if not row["episode_id"].startswith("e2-")]
    members.append({"episode_id": "e2-0", "group_id": "g2", "reward": 1.0, "kept": True})
    with pytest.raises(TrainingDataError, match=r"episode e2-0 is the only graded member .* leave_one_out has no"):
        train(world, "alone", world.dataset(rows, members), start, algorithm={"kind": "rloo"})


def test_rewards_without_variance_train_without_nan(world: World) -> None:
    start = base(world)
    whole = own_dataset(world, start)
    members = [
        {**row, "reward": 0.1} for row in whole.table("members.parquet").to_pylist() if row["reward"] is not None
    ]
    flat = world.dataset(whole.table("train.parquet").to_pylist(), members)
    for kind in ("grpo", "reinforce_pp", "rloo"):
        result, seen = train(world, f"flat-{kind}", flat, start, algorithm={"kind": kind})
        assert [record["loss"] for record in seen if "loss" in record] == pytest.approx([0.0, 0.0], abs=1e-6)
        assert result.metrics["skipped"] is False


def state_of(world: World, result: TrainResult) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(open_artifact(world.store, result.trainer_state).path("state.safetensors"))


def test_the_value_head_is_in_the_trainer_state_and_not_in_the_checkpoint(world: World) -> None:
    start = base(world)
    dataset = own_dataset(world, start)
    first, seen = train(world, "one", dataset, start, algorithm={"kind": "ppo"})
    assert all("value_loss" in record for record in seen if "loss" in record)
    saved = state_of(world, first)
    assert float(saved["critic.adamw.step"]) == 2.0 and bool(saved["critic.weight"].any())
    assert "critic.adamw.exp_avg_sq.bias" in saved
    folder = open_artifact(world.store, first.checkpoint).directory()
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        assert not any("critic" in name for name in file.keys())  # noqa: SIM118
    second, _ = train(world, "two", dataset, first, algorithm={"kind": "ppo"})
    assert float(state_of(world, second)["critic.adamw.step"]) == 4.0
    other, _ = train(world, "three", dataset, first, algorithm={"kind": "grpo"})
    assert not any(name.startswith("critic.") for name in state_of(world, other))


def test_a_saved_value_head_continues_bit_for_bit(world: World) -> None:
    algorithm, width = Ppo(), 8
    hidden, targets = torch.randn(30, width), torch.randn(30)

    def steps(critic: Critic, count: int) -> Critic:
        for _ in range(count):
            critic.clear_gradients()
            (critic.values(hidden) - targets).square().mean().backward()
            critic.step()
        return critic

    fresh = Critic(algorithm, width, 0.9, 0.95, {})
    assert not bool(fresh.values(hidden).any())
    halfway = {name: tensor.clone() for name, tensor in steps(fresh, 3).state().items()}
    resumed = steps(Critic(algorithm, width, 0.9, 0.95, halfway), 3)
    for name, tensor in steps(fresh, 3).state().items():
        assert torch.equal(tensor, resumed.state()[name]), name


def test_the_value_head_does_not_train_the_policy(parameters: Parameters) -> None:
    critic = Critic(Ppo(), CONFIG["hidden_size"], 0.9, 0.95, {})
    parameters.clear_gradients()
    hidden = score(parameters.leaves, CONFIG, make_batch(EXPERIENCE.sequences)).hidden
    (critic.values(hidden) - 1.0).square().sum().backward()
    assert not any(bool(buffer.gradient.any()) for buffer in parameters.buffers)
    assert bool(critic._buffer.gradient.all())


def test_ppo_learns_values_that_lower_its_loss(world: World) -> None:
    start = base(world)
    dataset = own_dataset(world, start)
    algorithm = {"kind": "ppo", "gae_lambda": 1.0, "value_learning_rate": 0.02, "value_clip": None}
    result, losses = start, []
    for number in range(6):
        result, seen = train(
            world, f"value-{number}", dataset, result, algorithm=algorithm, learning_rate=0.0, optimizer_steps=4
        )
        losses.append(np.mean([record["value_loss"] for record in seen if "loss" in record]))
    assert losses[-1] < 0.7 * losses[0]
    advantages, _ = generalized_advantages(np.zeros(3), 1.0, 1.0, 0.5)
    assert advantages.tolist() == [0.25, 0.5, 1.0]


def test_mismatch_metrics_are_those_of_their_definitions() -> None:
    trainer, sampler = torch.log(torch.tensor([0.5, 0.2, 0.9])), torch.log(torch.tensor([0.4, 0.4, 0.9]))
    found = mismatch_metrics([trainer[:1], trainer[1:]], [sampler[:1], sampler[1:]])
    weights = np.asarray([1.25, 0.5, 1.0])
    assert found["mismatch_k1"] == pytest.approx(-np.log(weights).mean(), rel=1e-6)
    assert found["mismatch_k3"] == pytest.approx((weights - 1 - np.log(weights)).mean(), rel=1e-6)
    assert found["mismatch_max_dp"] == pytest.approx(0.2, rel=1e-6)
    assert found["effective_sample_size"] == pytest.approx(weights.sum() ** 2 / (3 * (weights**2).sum()), rel=1e-6)
    assert found["sampler_mismatch_max"] == pytest.approx(np.log(2), rel=1e-6)
