"""Output head: log probabilities of the scored tokens and entropies, in bounded memory.

The plain path holds about four tensors of [scored, vocabulary] at once. `triplane_kernels.loss_head` holds few tiles of
16 MiB and computes the logits again in backward; on a GPU it runs as Triton kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LARGEST_LOGITS = 256 * 2**20
"""Bytes of logits up to which a CPU takes the plain path, whose bits existing runs have. The quickstart's largest are
25 MB: 8,192 tokens, vocabulary 768.
"""


def target_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Log probability of each target and entropy of each distribution, both float32 [scored], in nats.

    hidden [scored, width] and weight [vocabulary, width] have one dtype; targets int64 [scored]. The distribution is
    softmax(hidden @ weight.T / temperature). Log probabilities are differentiable in hidden and weight; entropies carry
    no gradient. Both paths agree to float32's rounding.

    dtype: bfloat16 rounds hidden, weight and logits to it, as a head of that dtype in an engine does; the softmax stays
    float32. Sums are float64 on a CPU: see `trainer.recipes.base`.
    """
    if dtype is not None and dtype != hidden.dtype:
        return _narrow_scores(hidden, weight, targets, temperature, dtype)
    if hidden.is_cuda or len(hidden) * len(weight) * hidden.element_size() > LARGEST_LOGITS:
        # Imported here: it takes a quarter of a second, and small models never need it.
        from triplane_kernels.loss_head import loss_head

        logprobs, entropy = loss_head(hidden, weight, targets, temperature=temperature)
        return logprobs, entropy.detach()
    return _from_logits(F.linear(hidden, weight), targets, temperature)


def _narrow_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`target_scores` with rounded logits, computed again in backward a part of the rows at a time."""
    narrow = weight.to(dtype)

    def scores(rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        operands = rows.to(dtype), narrow
        wide = operands if rows.is_cuda else tuple(operand.double() for operand in operands)
        return _from_logits(F.linear(*wide).to(dtype).float(), wanted, temperature)

    size = max(1, LARGEST_LOGITS // (len(weight) * 4))
    if len(hidden) <= size:
        return scores(hidden, targets)
    parts = [
        checkpoint(scores, rows, wanted, use_reentrant=False, preserve_rng_state=False)
        for rows, wanted in zip(torch.split(hidden, size), torch.split(targets, size), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _from_logits(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    if temperature != 1.0:
        logits = logits / temperature
    every = F.log_softmax(logits, dim=-1)
    logprobs = every.gather(1, targets[:, None]).squeeze(1)
    with torch.no_grad():
        entropy = -(every.exp() * every).sum(-1)
    return logprobs, entropy
