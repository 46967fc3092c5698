"""Output head: log probabilities of the scored tokens and entropies, in bounded memory.

The plain path holds about four tensors of [scored, vocabulary] at once. `triplane_kernels.loss_head` holds few tiles of
16 MiB and computes the logits again in backward; on a GPU it runs as Triton kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST_LOGITS = 256 * 2**20
"""Bytes of logits up to which a CPU takes the plain path, whose bits existing runs have. The quickstart's largest are
25 MB: 8,192 tokens, vocabulary 768.
"""


def target_scores(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log probability of each target and entropy of each distribution, both float32 [scored], in nats.

    hidden [scored, width] and weight [vocabulary, width] have one dtype; targets int64 [scored]. The distribution is
    softmax(hidden @ weight.T / temperature). Log probabilities are differentiable in hidden and weight; entropies carry
    no gradient. Both paths agree to float32's rounding.
    """
    if hidden.is_cuda or len(hidden) * len(weight) * hidden.element_size() > LARGEST_LOGITS:
        # Imported here: it takes a quarter of a second, and small models never need it.
        from triplane_kernels.loss_head import loss_head

        logprobs, entropy = loss_head(hidden, weight, targets, temperature=temperature)
        return logprobs, entropy.detach()
    logits = F.linear(hidden, weight)
    if temperature != 1.0:
        logits = logits / temperature
    every = F.log_softmax(logits, dim=-1)
    logprobs = every.gather(1, targets[:, None]).squeeze(1)
    with torch.no_grad():
        entropy = -(every.exp() * every).sum(-1)
    return logprobs, entropy
