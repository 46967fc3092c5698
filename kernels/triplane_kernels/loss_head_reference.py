"""The fused loss head in plain torch, on any device: one pass over chunks of the vocabulary.

Source: the running log-sum-exp is that of online softmax (arXiv:1805.02867); a chunk's gradient needs nothing but the
chunk's logits and the saved log-sum-exp and entropy, so backward computes each chunk's logits again (arXiv:2411.09009).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 4096
"""Vocabulary entries at a time: the peak is [tokens, CHUNK] logits."""


@dataclass(frozen=True)
class Head:
    """Contiguous inputs of `loss_head.loss_head`."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    temperature: float
    allowed: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are not None."""
        return [self.hidden, self.weight, self.targets, *(() if self.allowed is None else (self.allowed,))]


@dataclass(frozen=True)
class Sums:
    """Inputs of backward per token: gradients of the results, and values saved by forward; each [T]."""

    of_logprob: Tensor
    of_entropy: Tensor
    entropy: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Gradients:
    """Output tensors for gradients; an empty one is not required."""

    of_hidden: Tensor
    """[T, H]."""
    of_weight: Tensor
    """[V, H]."""


def loss_head_reference(head: Head) -> tuple[Tensor, Tensor, Tensor]:
    """Logprobs, entropy and log-sum-exp, each [T], in float32, or float64 when hidden is."""
    hidden, weight, targets = head.hidden, head.weight, head.targets
    wide = torch.promote_types(hidden.dtype, torch.float32)
    target_logit = hidden.new_full((hidden.shape[0],), torch.nan, dtype=wide)
    sums = []
    for start in range(0, weight.shape[0], CHUNK):
        logits = _logits(head, start)
        sums.append(_sums(logits))
        here = (targets >= start) & (targets < start + logits.shape[1])
        local = (targets - start).clamp(0, logits.shape[1] - 1).long()
        target_logit = torch.where(here, logits.gather(1, local[:, None]).squeeze(1), target_logit)
    peaks, masses, moments = (torch.stack(parts) for parts in zip(*sums, strict=True))
    log_mass, mean, lse = combine(peaks, masses, moments)
    return target_logit - lse, log_mass - mean, lse


def loss_head_backward_reference(head: Head, sums: Sums, into: Gradients) -> None:
    """Write the gradients of hidden and weight."""
    hidden, weight, targets = head.hidden, head.weight, head.targets
    total = torch.zeros_like(hidden, dtype=sums.lse.dtype)
    for start in range(0, weight.shape[0], CHUNK):
        logits = _logits(head, start)
        stop = start + logits.shape[1]
        logprobs = logits - sums.lse[:, None]
        coefficient = sums.of_logprob[:, None] + sums.of_entropy[:, None] * (logprobs + sums.entropy[:, None])
        columns = torch.arange(start, stop, device=hidden.device)
        slope = (targets[:, None] == columns) * sums.of_logprob[:, None] - logprobs.exp() * coefficient
        # A forbidden entry has probability 0, logprob -inf and no gradient, but a NaN gradient reaches it, too.
        nothing = torch.where(sums.of_logprob.isnan(), torch.nan, 0.0)[:, None]
        slope = torch.where(logits == -torch.inf, nothing, slope / head.temperature)
        if into.of_hidden.numel():
            total += slope @ weight[start:stop].to(sums.lse.dtype)
        if into.of_weight.numel():
            into.of_weight[start:stop] = slope.mT @ hidden.to(sums.lse.dtype)
    if into.of_hidden.numel():
        into.of_hidden.copy_(total)


def _logits(head: Head, start: int) -> Tensor:
    wide = torch.promote_types(head.hidden.dtype, torch.float32)
    logits = head.hidden.to(wide) @ head.weight[start : start + CHUNK].to(wide).mT / head.temperature
    if head.allowed is None:
        return logits
    return logits.masked_fill(~head.allowed[..., start : start + CHUNK], -torch.inf)


def _sums(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For every row: the largest logit, the sum of exp(z - largest), and the sum of exp(z - largest) * (z -
    largest).
    """
    peak = logits.amax(-1)
    # A row without allowed entries has no largest logit: shift by 0 instead of -inf.
    shifted = logits - torch.where(peak == -torch.inf, 0, peak)[:, None]
    share = shifted.exp()
    return peak, share.sum(-1), torch.where(share == 0, 0, share * shifted).sum(-1)


def combine(peaks: Tensor, masses: Tensor, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the sums of the parts of a row, each [parts, T]. Returns log(mass), moment / mass, and the log-sum-exp,
    each [T].

    The entropy is log(mass) - moment / mass: both are relative to the largest logit, so nothing large cancels.
    """
    peak = peaks.amax(0)
    drops = peaks - torch.where(peak == -torch.inf, 0, peak)
    scales = drops.exp()
    mass = (masses * scales).sum(0)
    moment = torch.where(scales == 0, 0, scales * (moments + masses * drops)).sum(0)
    log_mass = mass.log()
    return log_mass, moment / mass, peak + log_mass
