"""Losses as pure functions of tensors; `experience.py` computes the advantages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0
"""In nats. The clip bounds are far below (exp(20) is 4.9e8), so this bound changes no update; it keeps exp() finite in
float32, which overflows above exp(88.7).
"""


@dataclass(frozen=True)
class PolicyLoss:
    """Contribution of a microbatch to the policy loss, with numbers to report. All are sums over its tokens."""

    loss: Tensor
    tokens: Tensor
    """float32 [tokens], without gradient: the loss of each token."""
    clipped: Tensor
    """Number of tokens for which the clipped term is the smaller one."""
    dual_clipped: Tensor
    """Tokens of negative advantage whose ratio exceeds `dual_clip`; they give no gradient."""
    bounded: Tensor
    """Tokens whose log ratio lies outside +-LOG_RATIO_BOUND; they give no gradient."""
    correction: Tensor
    """Truncated importance weights."""
    divergence: Tensor
    """k3 estimate of KL(old || new): ratio - 1 - log ratio (J. Schulman, "Approximating KL divergence", 2020)."""


def policy_loss(
    logprobs: Tensor,
    old: Tensor,
    sampler: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    cap: float,
) -> PolicyLoss:
    """Sum over tokens of -w * s, s = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), and max(s, dual_clip * A) where
    A < 0.

    All inputs float32 [tokens]. r = exp(logprobs - old), its logarithm cut to +-LOG_RATIO_BOUND: PPO's ratio
    (arXiv:1707.06347, equation 7) with DAPO's asymmetric clip (arXiv:2503.14476, section 3.1) and dual clip
    (arXiv:1912.09729, equation 3). w = min(exp(old - sampler), cap): truncated importance sampling between trainer and
    sampler (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025). Divide the sum
    by all tokens of the optimizer's batch: DAPO's token-level aggregation, section 3.3. No reference KL.

    With respect to its log probability no token's gradient exceeds cap * max(1 + clip_high, dual_clip) * |A|.
    """
    difference = logprobs - old
    near = difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = near.exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    least = torch.minimum(plain, clipped)
    floor = dual_clip * advantages
    kept = torch.where(advantages < 0, torch.maximum(least, floor), least)
    weight = (old - sampler).exp().clamp(max=cap)
    tokens = -(weight * kept)
    with torch.no_grad():
        divergence = (ratio - 1 - near).sum()
    return PolicyLoss(
        loss=tokens.sum(),
        tokens=tokens.detach(),
        clipped=(clipped < plain).sum(),
        dual_clipped=((advantages < 0) & (least < floor)).sum(),
        bounded=(difference.abs() > LOG_RATIO_BOUND).sum(),
        correction=weight.sum(),
        divergence=divergence,
    )


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


def first_not_finite(values: Tensor) -> int | None:
    """Index of the first value that is NaN or infinite, or None."""
    lost = (~torch.isfinite(values)).nonzero()
    return int(lost[0]) if len(lost) else None
