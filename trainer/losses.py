"""Losses as pure functions of tensors. `trainer.algorithms` has the objectives and corrections that they combine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer.algorithms import Algorithm
from trainer.algorithms.base import Tokens
from trainer.algorithms.corrections import Corrections, correct
from trainer.algorithms.grpo import Grpo
from trainer.algorithms.surrogates import LOG_RATIO_BOUND, bounded, k3


@dataclass(frozen=True)
class PolicyLoss:
    """Contribution of a microbatch to the policy loss, with numbers to report, which are sums over its tokens."""

    loss: Tensor
    """To be divided by the algorithm's `divisor`; carries the gradient."""
    tokens: Tensor
    """float32 [tokens], without gradient: the loss of each token before the aggregation."""
    clipped: Tensor
    """Number of tokens for which the clipped term is the smaller one."""
    dual_clipped: Tensor
    """Tokens of negative advantage whose ratio exceeds `dual_clip`; they give no gradient."""
    bounded: Tensor
    """Tokens whose log ratio lies outside +-LOG_RATIO_BOUND."""
    correction: Tensor
    """Importance weights."""
    divergence: Tensor
    """k3 estimate of KL(old || new)."""
    masked: Tensor
    """Tokens that the corrections drop."""
    masked_by: dict[str, Tensor]
    """Tokens that each configured correction drops."""


def policy_loss(algorithm: Algorithm, corrections: Corrections, tokens: Tokens) -> PolicyLoss:
    """Sum over tokens of -w * s, s being the algorithm's objective and w the corrections' weight, 0 if dropped.

    GRPO adds kl_coefficient * k3 to each token that is kept. With `aggregation: sequence` a token's loss is divided by
    the number of tokens of its sequence. Divide the sum by the algorithm's `divisor`, counted over the whole optimizer
    step: then the losses of the parts of a batch, and their gradients, add up to the batch's own however it is cut.

    Without correction weights above `importance_cap` and with `dual_clip` set, no token's gradient with respect to its
    log probability exceeds importance_cap * max(1 + clip_high, dual_clip) * |A|, before the division.
    """
    corrected = correct(corrections, tokens)
    weight, keep = corrected.weight, corrected.keep
    if keep is not None:
        # a sequence's ratio contains its dropped tokens, as constants
        tokens = replace(tokens, logprobs=tokens.logprobs.where(keep, tokens.logprobs.detach()))
    difference = algorithm.log_ratio(tokens)
    ratio = bounded(difference).exp()
    objective = algorithm.objective(tokens, ratio)
    values = -objective.values if weight is None else -(weight * objective.values)
    if isinstance(algorithm, Grpo) and algorithm.kl_coefficient:
        values = values + algorithm.kl_coefficient * k3(bounded(tokens.old - tokens.logprobs))
    if keep is not None:
        values = values.where(keep, values.new_zeros(()))
    shares = values / tokens.lengths[tokens.owners] if algorithm.aggregation == "sequence" else values
    with torch.no_grad():
        divergence = k3(bounded(tokens.logprobs - tokens.old)).sum()
    count = torch.tensor(float(len(values)))
    return PolicyLoss(
        loss=shares.sum(),
        tokens=values.detach(),
        clipped=objective.clipped.sum(),
        dual_clipped=objective.dual_clipped.sum(),
        bounded=(difference.abs() > LOG_RATIO_BOUND).sum(),
        correction=count if weight is None else weight.sum(),
        divergence=divergence,
        masked=count * 0 if keep is None else (~keep).sum(),
        masked_by={name: mask.sum() for name, mask in corrected.dropped.items()},
    )


def value_loss(values: Tensor, start: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """Sum over tokens of max((v - R)^2, (v_clip - R)^2) / 2, v_clip = start + clip(v - start, -clip, clip).

    PPO's squared-error loss (arXiv:1707.06347, equation 9) with the clip of OpenAI baselines' ppo2. All float32
    [tokens]. start: values before the first step.
    """
    errors = (values - returns).square()
    if clip is not None:
        near = start + (values - start).clamp(-clip, clip)
        errors = torch.maximum(errors, (near - returns).square())
    return errors.sum() / 2


def balance_loss(probabilities: Tensor, counts: Tensor, picks: int) -> Tensor:
    """Load-balance loss of the routers, averaged over layers: experts * sum over experts of f_e * p_e; 1 when balanced.

    Switch Transformer (arXiv:2101.03961, equations 4 to 6). counts, float32 [layers, experts], without gradient: tokens
    routed to each expert in the whole optimizer batch, once for each of a token's `picks` experts; f_e is their share.
    probabilities, float32 [layers, experts]: the router's probabilities summed over the tokens of the batch or of a
    part of it; p_e is that sum over the number of tokens of the whole batch. Linear in `probabilities`: the losses of
    the parts of a batch, and their gradients, add up to the batch's own however it is cut.
    """
    picked = counts.sum(-1, keepdim=True)
    shares, means = counts / picked, probabilities * (picks / picked)
    return counts.shape[-1] * (shares * means).sum(-1).mean()


def z_loss(squares: Tensor, counts: Tensor, picks: int) -> Tensor:
    """Mean over tokens and layers of the squared logarithm of the routers' partition function: keeps router logits
    small.

    ST-MoE (arXiv:2202.08906, equation 5). squares, float32 [layers]: sum of (log sum_e exp(x_e))^2 over the tokens of
    the batch or of a part of it. counts: as in `balance_loss`, of the whole optimizer batch. Linear in `squares`: the
    losses of the parts of a batch, and their gradients, add up to the batch's own however it is cut.
    """
    return (squares * picks / counts.sum(-1)).mean()


def first_not_finite(values: Tensor) -> int | None:
    """Index of the first value that is NaN or infinite, or None."""
    lost = (~torch.isfinite(values)).nonzero()
    return int(lost[0]) if len(lost) else None
