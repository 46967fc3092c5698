"""The fused loss head in plain torch, on any device: tiles of logits, each reduced in place and discarded.

Source: the running log-sum-exp is that of online softmax (arXiv:1805.02867); a tile's gradient needs nothing but the
tile's logits and the row sums saved by forward, so backward computes each tile's logits again (arXiv:2411.09009).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 4096
"""Vocabulary entries of a tile."""
ROWS = 1024
"""Tokens of a tile. Two tiles of [ROWS, CHUNK] exist at a time, 16 MiB each in float32."""


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
    peak: Tensor
    """The largest logit."""
    log_mass: Tensor
    """log of the sum of exp(logit - peak); peak + log_mass is the log-sum-exp, which rounds to the size of the peak."""


@dataclass(frozen=True)
class Gradients:
    """Output tensors for gradients; an empty one is not required."""

    of_hidden: Tensor
    """[T, H]."""
    of_weight: Tensor
    """[V, H]."""


def loss_head_reference(head: Head) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprobs, entropy, largest logit and log mass, each [T], in float32, or float64 when hidden is."""
    space = _space(head)
    results = [_forward(head, rows, space) for rows in _slices(len(head.hidden), ROWS)]
    logprobs, entropy, peak, log_mass = (torch.cat(parts) for parts in zip(*results, strict=True))
    return logprobs, entropy, peak, log_mass


def _forward(head: Head, rows: slice, space: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    targets = head.targets[rows]
    target_logit = head.hidden.new_full(targets.shape, torch.nan, dtype=_wide(head))
    sums = []
    for columns in _slices(len(head.weight), CHUNK):
        logits = _logits(head, rows, columns, space[0])
        inside, local = _targets_inside(targets, columns)
        target_logit[inside] = logits[inside, local]
        sums.append(_sums(logits, space[1]))
    peaks, masses, moments = (torch.stack(parts) for parts in zip(*sums, strict=True))
    log_mass, mean, peak = combine(peaks, masses, moments)
    return target_logit - peak - log_mass, log_mass - mean, peak, log_mass


def loss_head_backward_reference(head: Head, sums: Sums, into: Gradients) -> None:
    """Write the gradients of hidden and weight."""
    wide, space = _wide(head), _space(head)
    of_hidden = torch.zeros_like(head.hidden, dtype=wide)
    entropies = bool((sums.of_entropy != 0).any())
    for columns in _slices(len(head.weight), CHUNK):
        weight = head.weight[columns].to(wide)
        part = into.of_weight[columns]
        of_weight = part.zero_() if part.dtype == wide else torch.zeros_like(part, dtype=wide)
        for rows in _slices(len(head.hidden), ROWS):
            slopes = _slopes(head, sums, rows, columns, space, entropies=entropies)
            if into.of_hidden.numel():
                of_hidden[rows].addmm_(slopes, weight)
            if into.of_weight.numel():
                of_weight.addmm_(slopes.mT, head.hidden[rows].to(wide))
        if of_weight is not part:
            part.copy_(of_weight)
    if into.of_hidden.numel():
        into.of_hidden.copy_(of_hidden)


def _slopes(head: Head, sums: Sums, rows: slice, columns: slice, space: Tensor, *, entropies: bool) -> Tensor:
    """Gradient of a tile of hidden @ weight.T. entropies: whether any entropy has a gradient."""
    of_logprob = sums.of_logprob[rows, None]
    logits = _logits(head, rows, columns, space[0])
    forbidden = logits == -torch.inf
    logprobs = logits.sub_(sums.peak[rows, None]).sub_(sums.log_mass[rows, None])
    slopes = torch.exp(logprobs, out=_shaped(space[1], logprobs.shape))
    if entropies:
        slopes.mul_(logprobs.add_(sums.entropy[rows, None]).mul_(sums.of_entropy[rows, None]).add_(of_logprob)).neg_()
    else:
        slopes.mul_(-of_logprob)
    inside, local = _targets_inside(head.targets[rows], columns)
    slopes[inside, local] += sums.of_logprob[rows][inside]
    slopes.div_(head.temperature)
    if forbidden.any():
        # A forbidden entry has probability 0, logprob -inf and no gradient, but a NaN gradient reaches it, too.
        slopes = torch.where(forbidden, torch.where(of_logprob.isnan(), torch.nan, 0.0), slopes)
    return slopes


def _slices(count: int, size: int) -> Iterator[slice]:
    """Consecutive slices of at most `size`; one empty slice for a count of 0."""
    return (slice(start, min(start + size, count)) for start in range(0, max(count, 1), size))


def _targets_inside(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Rows whose target lies in `columns`, and its place there."""
    inside = ((targets >= columns.start) & (targets < columns.stop)).nonzero().squeeze(1)
    return inside, targets[inside].long() - columns.start


def _wide(head: Head) -> torch.dtype:
    return torch.promote_types(head.hidden.dtype, torch.float32)


def _space(head: Head) -> Tensor:
    """Memory of two tiles, reused by all: blocks freed between others would fragment the heap."""
    return head.hidden.new_empty(2, min(ROWS, len(head.hidden)) * min(CHUNK, len(head.weight)), dtype=_wide(head))


def _shaped(space: Tensor, shape: Sequence[int]) -> Tensor:
    return space[: math.prod(shape)].view(*shape)


def _logits(head: Head, rows: slice, columns: slice, space: Tensor) -> Tensor:
    wide = _wide(head)
    hidden, weight = head.hidden[rows].to(wide), head.weight[columns].to(wide)
    logits = torch.mm(hidden, weight.mT, out=_shaped(space, (len(hidden), len(weight)))).div_(head.temperature)
    if head.allowed is None:
        return logits
    allowed = head.allowed[columns] if head.allowed.dim() == 1 else head.allowed[rows, columns]
    return logits.masked_fill_(~allowed, -torch.inf)


def _sums(logits: Tensor, space: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For every row: the largest logit, the sum of exp(z - largest), and the sum of exp(z - largest) * (z -
    largest). Overwrites `logits` and `space`.
    """
    peak = logits.amax(-1)
    # A row without allowed entries has no largest logit: shift by 0 instead of -inf.
    shifted = logits.sub_(torch.where(peak == -torch.inf, 0, peak)[:, None])
    share = torch.exp(shifted, out=_shaped(space, shifted.shape))
    mass = share.sum(-1)
    return peak, mass, shifted.masked_fill_(share == 0, 0).mul_(share).sum(-1)


def combine(peaks: Tensor, masses: Tensor, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the sums of the parts of a row, each [parts, T]. Returns log(mass), moment / mass, and the largest logit,
    each [T].

    The entropy is log(mass) - moment / mass: both are relative to the largest logit, so nothing large cancels.
    """
    peak = peaks.amax(0)
    drops = peaks - torch.where(peak == -torch.inf, 0, peak)
    scales = drops.exp()
    mass = (masses * scales).sum(0)
    moment = torch.where(scales == 0, 0, scales * (moments + masses * drops)).sum(0)
    return mass.log(), moment / mass, peak
