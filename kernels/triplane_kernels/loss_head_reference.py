"""The fused loss head in plain torch, on any device: one pass over chunks of the vocabulary, each seen and forgotten.

Source: the running log-sum-exp is that of online softmax (arXiv:1805.02867); a chunk's gradient needs nothing but the chunk's
logits and the saved log-sum-exp and entropy, so backward computes each chunk's logits again (arXiv:2411.09009).
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 4096
"""Vocabulary entries at a time: the peak is [tokens, CHUNK] logits."""


def loss_head_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, allowed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, entropy and log-sum-exp, each [T], in float32, or float64 when hidden is."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    target_logit = hidden.new_full((hidden.shape[0],), torch.nan, dtype=wide)
    sums = []
    for start in range(0, weight.shape[0], CHUNK):
        logits = _logits(hidden, weight, start, temperature, allowed)
        sums.append(_sums(logits))
        here = (targets >= start) & (targets < start + logits.shape[1])
        local = (targets - start).clamp(0, logits.shape[1] - 1).long()
        target_logit = torch.where(here, logits.gather(1, local[:, None]).squeeze(1), target_logit)
    peaks, masses, moments = (torch.stack(parts) for parts in zip(*sums, strict=True))
    log_mass, mean, lse = combine(peaks, masses, moments)
    return target_logit - lse, log_mass - mean, lse


def loss_head_backward_reference(
    logprob_gradient: Tensor,
    entropy_gradient: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    allowed: Tensor | None,
    entropy: Tensor,
    lse: Tensor,
    of_hidden: Tensor,
    of_weight: Tensor,
) -> None:
    """Writes the gradients of hidden [T, H] and weight [V, H] into of_hidden and of_weight; not into an empty one."""
    total = torch.zeros_like(hidden, dtype=lse.dtype)
    for start in range(0, weight.shape[0], CHUNK):
        logits = _logits(hidden, weight, start, temperature, allowed)
        stop = start + logits.shape[1]
        logprobs = logits - lse[:, None]
        coefficient = logprob_gradient[:, None] + entropy_gradient[:, None] * (logprobs + entropy[:, None])
        columns = torch.arange(start, stop, device=hidden.device)
        slope = (targets[:, None] == columns) * logprob_gradient[:, None] - logprobs.exp() * coefficient
        # What is not allowed has probability 0 and logprob -inf, and no gradient; one that is NaN reaches it too.
        nothing = torch.where(logprob_gradient.isnan(), torch.nan, 0.0)[:, None]
        slope = torch.where(logits == -torch.inf, nothing, slope / temperature)
        if of_hidden.numel():
            total += slope @ weight[start:stop].to(lse.dtype)
        if of_weight.numel():
            of_weight[start:stop] = slope.mT @ hidden.to(lse.dtype)
    if of_hidden.numel():
        of_hidden.copy_(total)


def _logits(hidden: Tensor, weight: Tensor, start: int, temperature: float, allowed: Tensor | None) -> Tensor:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(wide) @ weight[start : start + CHUNK].to(wide).mT / temperature
    if allowed is None:
        return logits
    return logits.masked_fill(~allowed[..., start : start + CHUNK], -torch.inf)


def _sums(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of every row: the largest logit, the sum of exp(z - largest), the sum of that times (z - largest)."""
    peak = logits.amax(-1)
    # A row of which nothing is allowed has no largest: shift by 0 instead of by -inf.
    shifted = logits - torch.where(peak == -torch.inf, 0, peak)[:, None]
    share = shifted.exp()
    return peak, share.sum(-1), torch.where(share == 0, 0, share * shifted).sum(-1)


def combine(peaks: Tensor, masses: Tensor, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Joins the sums of the parts of a row, each [parts, T]: returns log(mass), moment / mass, and the log-sum-exp, each [T].

    The entropy is log(mass) - moment / mass: both are relative to the largest logit, so nothing large cancels.
    """
    peak = peaks.amax(0)
    drops = peaks - torch.where(peak == -torch.inf, 0, peak)
    scales = drops.exp()
    mass = (masses * scales).sum(0)
    moment = torch.where(scales == 0, 0, scales * (moments + masses * drops)).sum(0)
    log_mass = mass.log()
    return log_mass, moment / mass, peak + log_mass
