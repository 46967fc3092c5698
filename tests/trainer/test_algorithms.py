"""Losses and gradients of every algorithm and correction equal an independent float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference_losses as reference
import torch
from pydantic import TypeAdapter, ValidationError

from trainer.algorithms import Algorithm
from trainer.algorithms.advantages import generalized_advantages, reward_advantages
from trainer.algorithms.base import Tokens
from trainer.algorithms.corrections import MASKS, Corrections
from trainer.losses import PolicyLoss, policy_loss, value_loss

ALGORITHM: TypeAdapter[Any] = TypeAdapter(Algorithm)
KINDS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp", "ppo")
OFF: dict[str, Any] = {"importance_cap": None}
VARIANTS: list[dict[str, Any]] = [
    *({"kind": kind} for kind in KINDS),
    *({"kind": kind, "dual_clip": 3.0, "clip_high": 0.28} for kind in KINDS if kind != "cispo"),
    *({"kind": "grpo", "aggregation": name} for name in ("token", "constant")),
    *({"kind": kind, "aggregation": "sequence"} for kind in ("dapo", "cispo", "ppo", "reinforce_pp")),
    {"kind": "grpo", "kl_coefficient": 0.04},
    {"kind": "grpo", "kl_coefficient": 0.04, "aggregation": "token", "dual_clip": 2.0},
    {"kind": "gspo", "clip_low": 0.2, "clip_high": 0.2},
    {"kind": "cispo", "clip_low": 0.5, "clip_high": 0.5},
]
CORRECTIONS: list[dict[str, Any]] = [
    OFF,
    {"importance_cap": 2.0},
    {**OFF, "ratio_mask": {"low": 0.5, "high": 5.0}},
    {"importance_cap": 5.0, "ratio_mask": {"low": 0.8, "high": 5.0}},
    {**OFF, "probability_gap": {"low": 0.05, "high": 0.1}},
    {**OFF, "sequence_rejection": {"ratio": "geometric", "low": 0.9, "high": 1.1}},
    {**OFF, "sequence_rejection": {"ratio": "product", "low": 0.5, "high": 2.0}},
    {**OFF, "veto": 0.5},
    {
        "importance_cap": 2.0,
        "ratio_mask": {},
        "probability_gap": {},
        "sequence_rejection": {"low": 0.5, "high": 2.0},
        "veto": 1e-3,
    },
]
LONGEST = 40


def batch(seed: int, lengths: tuple[int, ...], spread: float = 0.4, drift: float = 0.3) -> list[dict[str, np.ndarray]]:
    """Random sequences of float32 numbers as float64. spread: of new against old; drift: of old against sampler."""
    draw, rows = np.random.default_rng(seed), []
    for length in lengths:
        old = -draw.exponential(1.0, length) - 0.02
        row = {
            "old": old,
            "new": np.minimum(old + draw.normal(0, spread, length), -1e-3),
            "sampler": np.minimum(old + draw.normal(0, drift, length), -1e-3),
            "advantage": np.full(length, draw.normal()),
        }
        rows.append({name: values.astype(np.float32).astype(np.float64) for name, values in row.items()})
    return rows


def ours(
    algorithm: Any, corrections: Corrections, rows: list[dict[str, np.ndarray]], dtype: torch.dtype = torch.float64
) -> tuple[PolicyLoss, torch.Tensor]:
    """The trainer's loss before the division, and the gradients of all tokens after it."""
    sizes = [len(row["new"]) for row in rows]
    names = ("new", "old", "sampler", "advantage")
    new, *others = (torch.from_numpy(np.concatenate([row[name] for row in rows])).to(dtype) for name in names)
    owners = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(sizes))
    tokens = Tokens(new.requires_grad_(), *others, owners=owners, lengths=torch.tensor(sizes, dtype=dtype))
    loss = policy_loss(algorithm, corrections, tokens)
    (loss.loss / algorithm.divisor(sum(sizes), len(rows), LONGEST)).backward()
    assert new.grad is not None
    return loss, new.grad


def compare(
    variant: dict[str, Any], corrections: dict[str, Any], rows: list[dict[str, np.ndarray]], calm: bool = False
) -> PolicyLoss:
    """Assert that loss and gradients are those of the reference, to 1e-9 in float64. calm: and to 1e-6 in float32."""
    algorithm, fixed = ALGORITHM.validate_python(variant), Corrections(**corrections)
    settings = algorithm.model_dump() | {"aggregation_length": LONGEST}
    expected, slopes = reference.evaluate(variant["kind"], rows, settings, fixed.model_dump())
    whole, wanted = algorithm.divisor(sum(len(row["new"]) for row in rows), len(rows), LONGEST), np.concatenate(slopes)
    loss, gradient = ours(algorithm, fixed, rows)
    assert float(loss.loss.detach()) / whole == pytest.approx(expected, rel=1e-9, abs=1e-12)
    np.testing.assert_allclose(gradient.numpy(), wanted, rtol=1e-9, atol=1e-12)
    if calm:
        loss, gradient = ours(algorithm, fixed, rows, torch.float32)
        assert float(loss.loss.detach()) / whole == pytest.approx(expected, rel=1e-6, abs=1e-6)
        np.testing.assert_allclose(gradient.numpy(), wanted, rtol=1e-6, atol=1e-6)
    return loss


@pytest.mark.parametrize("corrections", CORRECTIONS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_loss_and_gradient_are_those_of_the_paper(variant: dict[str, Any], corrections: dict[str, Any]) -> None:
    for seed in range(3):
        compare(variant, corrections, batch(seed, (1, 5, 2, 17, 9, 1)), calm=True)
    compare(variant, corrections, batch(3, (6, 3, 8), spread=1e-3, drift=1e-3), calm=True)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_single_token_is_a_whole_batch(variant: dict[str, Any]) -> None:
    for seed in range(8):
        compare(variant, {"importance_cap": 2.0}, batch(seed, (1,)))


@pytest.mark.parametrize("shift", [-300.0, -25.0, -3.0, 3.0, 25.0, 300.0])
@pytest.mark.parametrize("advantage", [-1.5, 0.0, 1.5])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_extreme_ratios_are_those_of_the_bounded_formula(
    variant: dict[str, Any], advantage: float, shift: float
) -> None:
    rows = batch(5, (4, 3))
    for row in rows:
        row["advantage"] = np.full(len(row["new"]), advantage)
    rows[0]["new"][1] += shift
    rows[1]["old"][2] += shift / 2
    rows[1]["sampler"][0] -= shift
    for corrections in ({"importance_cap": 2.0}, CORRECTIONS[-1]):
        loss = compare(variant, corrections, rows)
        assert bool(torch.isfinite(loss.tokens).all()) and bool(torch.isfinite(loss.divergence))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_that_a_correction_drops_whole_gives_zero_and_counts_every_token(kind: str, mask: str) -> None:
    rows = batch(1, (3, 1, 4))
    for row in rows:
        row["sampler"] = row["old"] + np.where(row["advantage"] > 0, -3.0, 3.0)
        row["new"] = row["old"].copy()
    narrow: dict[str, Any] = {
        "ratio_mask": {"low": 0.9, "high": 1.1},
        "probability_gap": {"low": 1e-4, "high": 1e-4},
        "sequence_rejection": {"low": 0.9, "high": 1.1},
        "veto": 0.5,
    }
    if mask == "veto":
        for row in rows:
            row["sampler"] = row["old"] + 3.0
    algorithm = ALGORITHM.validate_python({"kind": kind})
    loss, gradient = ours(algorithm, Corrections(**{mask: narrow[mask]}), rows)
    assert float(loss.loss.detach()) == 0.0 and not gradient.any()
    assert int(loss.masked) == 8 and {name: int(count) for name, count in loss.masked_by.items()} == {mask: 8}


@pytest.mark.parametrize("mask", ["ratio_mask", "probability_gap"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_dropped_token_of_a_sequence_has_no_gradient_and_the_others_keep_theirs(kind: str, mask: str) -> None:
    """The dropped token's ratio remains a factor of its sequence's, whose term four of five tokens carry."""
    rows = batch(4, (5,), spread=1e-5, drift=0.0)
    rows[0]["sampler"][2], rows[0]["advantage"][:] = -1e-3, -1.0
    algorithm = ALGORITHM.validate_python({"kind": kind})
    kept = np.arange(5) != 2
    loss, gradient = ours(algorithm, Corrections(importance_cap=None, **{mask: {}}), rows)
    _, plain = ours(algorithm, Corrections(importance_cap=None), rows)
    assert int(loss.masked) == 1 and float(gradient[2]) == 0.0 and bool(gradient[kept].all())
    share = 4 / 5 if kind in ("gspo", "rloo") else 1.0
    np.testing.assert_allclose(gradient[kept].numpy(), share * plain[kept].numpy(), rtol=1e-9)


def test_corrections_that_are_off_change_nothing() -> None:
    rows = batch(2, (4, 5))
    for row in rows:
        row["sampler"] = row["old"].copy()
    plain = ours(ALGORITHM.validate_python({"kind": "dapo"}), Corrections(importance_cap=None), rows)
    every = Corrections(ratio_mask={}, probability_gap={"low": 9, "high": 9}, veto=1e-3)
    held = ours(ALGORITHM.validate_python({"kind": "dapo"}), every, rows)
    assert torch.equal(plain[1], held[1]) and int(held[0].masked) == 0


ADVANTAGES = ("group_mean", "group_mean_std", "leave_one_out", "batch_normalized", "group_mean_batch_std")


def advantages_of(kind: Any, rewards: list[list[float]]) -> np.ndarray:
    groups = np.repeat(np.arange(len(rewards)), [len(group) for group in rewards])
    means = np.asarray([np.mean(rewards[group]) for group in groups])
    return reward_advantages(np.concatenate(rewards).astype(np.float64), groups, means, kind)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_advantages_are_those_of_the_papers(kind: str) -> None:
    draw = np.random.default_rng(0)
    rewards = [draw.normal(size=size).tolist() for size in (2, 8, 3)]
    expected = np.concatenate(reference.advantages(kind, rewards))
    np.testing.assert_allclose(advantages_of(kind, rewards), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_equal_rewards_give_no_advantage(kind: str) -> None:
    np.testing.assert_allclose(advantages_of(kind, [[0.1] * 7, [0.1, 0.1, 0.1]]), 0.0, atol=1e-9)


def test_a_group_of_one_has_no_leave_one_out_baseline_and_no_deviation() -> None:
    assert np.isnan(advantages_of("leave_one_out", [[1.0], [0.0, 1.0]])).tolist() == [True, False, False]
    assert advantages_of("group_mean_std", [[1.0], [0.0, 1.0]])[0] == 0.0


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 0.9), (1.0, 1.0), (0.9, 0.0)])
def test_generalized_advantages_are_the_sum_over_temporal_differences(gamma: float, lam: float) -> None:
    for length in (1, 2, 30):
        values = np.random.default_rng(length).normal(size=length)
        advantages, returns = generalized_advantages(values, 1.5, gamma, lam)
        expected = reference.gae(values.tolist(), 1.5, gamma, lam)
        np.testing.assert_allclose(advantages, expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(returns, values + expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_value_loss_and_its_gradient_are_those_of_the_reference(clip: float | None) -> None:
    draw = np.random.default_rng(0)
    start, returns = draw.normal(size=40), draw.normal(size=40)
    values = torch.tensor(start + draw.normal(0, 0.3, 40), requires_grad=True)
    loss = value_loss(values, torch.from_numpy(start), torch.from_numpy(returns), clip)
    loss.backward()
    expected, slopes = reference.value_loss(values.tolist(), start.tolist(), returns.tolist(), clip)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-9)
    assert values.grad is not None
    np.testing.assert_allclose(values.grad.numpy(), slopes, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "gspo", "aggregation": "token"}, "gspo has one term for each sequence"),
        ({"kind": "rloo", "aggregation": "constant"}, "rloo has one term for each sequence"),
        (
            {"kind": "grpo", "aggregation_length": 100},
            "aggregation_length=100: only aggregation constant divides by it",
        ),
        ({"kind": "cispo", "dual_clip": 3.0}, "cispo bounds the ratio of both signs"),
        ({"kind": "ppo", "advantage": "group_mean"}, "'gae'"),
        ({"kind": "vpg"}, "expected tags: 'grpo'"),
    ],
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ALGORITHM.validate_python(settings)
