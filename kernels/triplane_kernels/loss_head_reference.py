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
    top = torch.full((hidden.shape[0],), -torch.inf, dtype=wide, device=hidden.device)
    mass, moment = torch.zeros_like(top), torch.zeros_like(top)
    target_logit = torch.full_like(top, torch.nan)
    for start in range(0, weight.shape[0], CHUNK):
        logits = _logits(hidden, weight, start, temperature, allowed)
        top, mass, moment = _merge(logits, top, mass, moment)
        here = (targets >= start) & (targets < start + logits.shape[1])
        local = (targets - start).clamp(0, logits.shape[1] - 1).long()
        target_logit = torch.where(here, logits.gather(1, local[:, None]).squeeze(1), target_logit)
    log_mass = mass.log()
    lse = top + log_mass
    return target_logit - lse, log_mass - moment / mass, lse


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
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden [T, H] and weight [V, H], each in its own dtype."""
    of_hidden = torch.zeros(hidden.shape, dtype=lse.dtype, device=hidden.device)
    of_weight = torch.empty_like(weight)
    for start in range(0, weight.shape[0], CHUNK):
        logits = _logits(hidden, weight, start, temperature, allowed)
        stop = start + logits.shape[1]
        logprobs = logits - lse[:, None]
        coefficient = logprob_gradient[:, None] + entropy_gradient[:, None] * (logprobs + entropy[:, None])
        # A token that is not allowed has probability 0 and logprob -inf; their product counts as 0.
        slope = torch.where(logprobs == -torch.inf, 0, -logprobs.exp() * coefficient)
        columns = torch.arange(start, stop, device=hidden.device)
        slope = slope + torch.where((targets[:, None] == columns) & (logits != -torch.inf), logprob_gradient[:, None], 0)
        slope = slope / temperature
        of_hidden += slope @ weight[start:stop].to(lse.dtype)
        of_weight[start:stop] = (slope.mT @ hidden.to(lse.dtype)).to(weight.dtype)
    return of_hidden.to(hidden.dtype), of_weight


def _logits(hidden: Tensor, weight: Tensor, start: int, temperature: float, allowed: Tensor | None) -> Tensor:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    logits = hidden.to(wide) @ weight[start : start + CHUNK].to(wide).mT / temperature
    if allowed is None:
        return logits
    return logits.masked_fill(~allowed[..., start : start + CHUNK], -torch.inf)


def _merge(logits: Tensor, top: Tensor, mass: Tensor, moment: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Adds a chunk to the running maximum, sum of exp(z - maximum) and sum of exp(z - maximum) * (z - maximum)."""
    peak = torch.maximum(top, logits.amax(-1))
    # A row of which nothing is allowed yet has no maximum: shift by 0 instead of by -inf.
    shift = torch.where(peak == -torch.inf, 0, peak)
    drop = torch.where(top == -torch.inf, 0, top - shift)
    scale = torch.where(top == -torch.inf, 0, drop.exp())
    shifted = logits - shift[:, None]
    share = shifted.exp()
    chunk_moment = torch.where(share == 0, 0, share * shifted).sum(-1)
    return peak, mass * scale + share.sum(-1), scale * (moment + mass * drop) + chunk_moment
