"""Advantages and losses as pure functions of tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyLoss:
    """A microbatch's share of the policy loss, and what to report of it. All are sums over its tokens."""

    loss: Tensor
    clipped: Tensor
    """Tokens whose ratio was clipped against their advantage."""
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
    cap: float,
) -> PolicyLoss:
    """Sum over tokens of -w * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    All inputs float32 [tokens]. r = exp(logprobs - old): PPO's ratio (arXiv:1707.06347, equation 7) with DAPO's asymmetric clip
    (arXiv:2503.14476, section 3.1). w = min(exp(old - sampler), cap): truncated importance sampling between trainer and sampler (Yao et al.,
    "Your efficient RL framework secretly brings you off-policy RL training", 2025). Divide the sum by all tokens of the optimizer's batch:
    DAPO's token-level aggregation, section 3.3. No reference KL.
    """
    ratio = (logprobs - old).exp()
    plain = ratio * advantages
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    weight = (old - sampler).exp().clamp(max=cap)
    with torch.no_grad():
        difference = logprobs - old
        divergence = (difference.exp() - 1 - difference).sum()
    return PolicyLoss(
        loss=-(weight * torch.minimum(plain, bounded)).sum(),
        clipped=(bounded < plain).sum(),
        correction=weight.sum(),
        divergence=divergence,
    )


def group_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Reward minus its group's mean: GRPO (arXiv:2402.03300) without the division by the deviation (Dr. GRPO, arXiv:2503.20783).

    rewards float64 [members], groups int64 [members]: ALL graded members, so that those left out of training still count in the mean.
    """
    count = int(groups.max()) + 1 if len(groups) else 0
    total = torch.zeros(count, dtype=torch.float64).index_add_(0, groups, rewards)
    size = torch.zeros(count, dtype=torch.float64).index_add_(0, groups, torch.ones_like(rewards))
    return rewards - (total / size)[groups]
