"""What one token can do to a step, and losses that are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_trainer_balance import CONFIG, EXPERIENCE, OLD, RL, ROWS, start_of
from torch import Tensor
from trainer_world import QUICKSTART, World, backend_of

from trainer.algorithms.base import Tokens
from trainer.algorithms.corrections import Corrections
from trainer.algorithms.surrogates import LOG_RATIO_BOUND
from trainer.config import RlConfig
from trainer.errors import TrainingDiverged
from trainer.experience import Experience
from trainer.losses import PolicyLoss, first_not_finite, policy_loss
from trainer.parameters import Parameters, draw_masters
from trainer.rl import accumulate, score_start
from trainer.rl_metrics import Totals
from trainer.run import run_job

CAP, HIGH, DUAL = 2.0, 0.28, 3.0
PLAIN = RL.model_copy(update={"router_balance": 0.0})


def loss_of(shift: float, advantage: float, mismatch: float = 0.0) -> tuple[PolicyLoss, Tensor]:
    """Loss of one token whose log ratio is `shift`, and the gradient of its log probability."""
    logprob = torch.tensor([shift - 1.0], requires_grad=True)
    old = torch.tensor([-1.0])
    tokens = Tokens(
        logprob, old, old - mismatch, torch.tensor([advantage]), torch.zeros(1, dtype=torch.int64), torch.ones(1)
    )
    loss = policy_loss(QUICKSTART, Corrections(), tokens)
    loss.loss.backward()
    assert logprob.grad is not None
    return loss, logprob.grad


@given(st.floats(-300, 300), st.floats(-4, 4), st.floats(-300, 300))
def test_no_token_gives_more_gradient_than_the_documented_bound(
    shift: float, advantage: float, mismatch: float
) -> None:
    loss, gradient = loss_of(shift, advantage, mismatch)
    most = CAP * max(1 + HIGH, DUAL) * abs(advantage)
    assert abs(float(gradient[0])) <= most * (1 + 1e-5)
    for value in (loss.loss, loss.correction, loss.divergence):
        assert bool(torch.isfinite(value))


@pytest.mark.parametrize(
    ("shift", "advantage", "expected"),
    [
        (100.0, -1.0, 3.0),
        (100.0, 0.0, 0.0),
        (100.0, 1.0, -1.28),
        (-100.0, -1.0, 0.8),
        (-100.0, 0.0, 0.0),
        (-100.0, 1.0, 0.0),
    ],
)
def test_a_ratio_of_e_to_the_100_gives_finite_numbers_and_is_counted(
    shift: float, advantage: float, expected: float
) -> None:
    loss, gradient = loss_of(shift, advantage)
    assert float(loss.loss.detach()) == pytest.approx(expected, abs=1e-6)
    assert float(gradient[0]) == 0.0
    assert int(loss.bounded) == 1
    assert int(loss_of(LOG_RATIO_BOUND - 1, advantage)[0].bounded) == 0


@given(st.floats(-1.0, math.log(3.0) - 1e-3), st.sampled_from([-2.0, 2.0]))
def test_below_the_bounds_the_loss_is_that_of_the_plain_formula(shift: float, advantage: float) -> None:
    ratio = math.exp(float(torch.tensor([shift - 1.0]) - torch.tensor([-1.0])))
    plain = min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)
    assert float(loss_of(shift, advantage)[0].loss.detach()) == pytest.approx(-plain, rel=1e-5)


def step(
    parameters: Parameters, old: list[Tensor], experience: Experience = EXPERIENCE
) -> tuple[Totals, float, Tensor]:
    """Sums, gradient norm before clipping, and the flat gradient after clipping to 1, of one optimizer step over all
    rows.
    """
    parameters.clear_gradients()
    totals = accumulate(PLAIN, backend_of(parameters), experience, start_of(experience, old), [list(range(ROWS))])
    norm = float(parameters.clip_gradients(PLAIN.max_gradient_norm))
    return totals, norm, torch.cat([buffer.gradient.reshape(-1).clone() for buffer in parameters.buffers])


def test_one_token_at_ratio_78_does_not_rescale_the_minibatch() -> None:
    parameters = Parameters.from_masters(CONFIG, draw_masters(CONFIG, 0))
    calm = score_start(backend_of(parameters), EXPERIENCE, PLAIN).logprobs
    bad = int(EXPERIENCE.advantages.argmin())
    wild = [values.clone() for values in calm]
    wild[bad][0] -= math.log(78.0)
    odd = replace(EXPERIENCE, sampler_logprobs=wild)
    _, norm, before = step(parameters, calm, replace(EXPERIENCE, sampler_logprobs=calm))
    totals, wild_norm, after = step(parameters, wild, odd)
    assert totals.dual_clipped == 1
    assert wild_norm == pytest.approx(norm, rel=0.25)
    assert float(torch.nn.functional.cosine_similarity(before, after, dim=0)) > 0.9
    unbounded = RlConfig(algorithm=QUICKSTART.model_copy(update={"dual_clip": None}))
    parameters.clear_gradients()
    accumulate(unbounded, backend_of(parameters), odd, start_of(odd, wild), [list(range(ROWS))])
    assert float(parameters.clip_gradients(1.0)) > 5 * norm  # so the token would have ruled the step


def test_weights_that_are_not_finite_are_reported_by_episode() -> None:
    parameters = Parameters.from_masters(CONFIG, draw_masters(CONFIG, 0))
    with torch.no_grad():
        parameters.leaves["model.embed_tokens.weight"][int(EXPERIENCE.sequences[3].token_ids[0])] = float("nan")
    alone = replace(EXPERIENCE, sequences=EXPERIENCE.sequences[3:4], episodes=["the-one"], group_names=["its-group"])
    with pytest.raises(
        TrainingDiverged, match=r"starting weights .* episode the-one \(row 0 .* group its-group\) is nan"
    ):
        score_start(backend_of(parameters), alone, PLAIN)


def test_a_loss_that_is_not_finite_is_reported_by_episode() -> None:
    parameters = Parameters.from_masters(CONFIG, draw_masters(CONFIG, 0))
    advantages = EXPERIENCE.advantages.clone()
    advantages[7] = float("inf")
    with pytest.raises(TrainingDiverged, match=r"the loss of token \d+ of episode e7 \(row 7 .* group g1\) is"):
        step(parameters, OLD, replace(EXPERIENCE, advantages=advantages))


def test_a_warm_start_whose_loss_is_not_finite_names_a_row(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
        masters = draw_masters(config, seed)
        masters["model.norm.weight"][0] = float("nan")
        return masters

    monkeypatch.setattr("trainer.sft_start.draw_masters", spoiled)
    with pytest.raises(
        TrainingDiverged, match=r"row \d+ of artifacts/demonstrations/\S+ has log probability nan at step 0: lower"
    ):
        run_job(world.sft_job("diverging"))


def test_the_first_value_that_is_not_finite_is_found() -> None:
    assert first_not_finite(torch.tensor([1.0, float("-inf"), float("nan")])) == 1
    assert first_not_finite(torch.tensor([1.0])) is None
