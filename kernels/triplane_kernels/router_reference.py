"""The top-k router in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

TINY = 1e-20
"""Added to the normalizing sum: it does not change usual sums, and avoids 0 / 0 if all k scores underflow
(DeepSeek-V3).
"""


def route_reference(logits: Tensor, k: int, bias: Tensor | None, scores: str, normalize: bool) -> tuple[Tensor, Tensor]:
    """Weights [T, k] and experts int32 [T, k] of logits [T, E]."""
    every = scores_reference(logits, scores)
    # Scores increase with logits, so without a bias the logits decide, which avoids ties by rounding.
    keys = logits.to(every.dtype) if bias is None else every + bias.to(every.dtype)
    experts = keys.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights = every.gather(1, experts)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights, experts.int()


def route_backward_reference(gradient: Tensor, logits: Tensor, experts: Tensor, scores: str, normalize: bool) -> Tensor:
    """Gradient of logits [T, E] from that of the weights [T, k]; the choice of experts has no gradient."""
    every = scores_reference(logits, scores)
    chosen = experts.long()
    picked = every.gather(1, chosen)
    gradient = gradient.to(every.dtype)
    if normalize:
        total = picked.sum(-1, keepdim=True) + TINY
        gradient = (gradient - (gradient * picked).sum(-1, keepdim=True) / total) / total
    spread = torch.zeros_like(every).scatter_(1, chosen, gradient)
    if scores == "sigmoid":
        return (spread * every * (1 - every)).to(logits.dtype)
    return (every * (spread - (spread * every).sum(-1, keepdim=True))).to(logits.dtype)


def scores_reference(logits: Tensor, scores: str) -> Tensor:
    """Scores [T, E] in float32, or float64 when logits are."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.sigmoid() if scores == "sigmoid" else wide.softmax(-1)
