"""The expert layer in plain torch, differentiable by autograd, in any float dtype: the reference for all
implementations.
"""

from __future__ import annotations

import torch
from torch import Tensor

from triplane_kernels.router_reference import scores_reference


def expert_layer_reference(
    hidden: Tensor,
    logits: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    k: int,
    *,
    experts: Tensor | None = None,
    bias: Tensor | None = None,
    scores: str = "softmax",
    normalize: bool = True,
) -> Tensor:
    """out[t] = sum over the chosen experts e of share[t, e] * down[e] @ (silu(gate[e] @ hidden[t]) * (up[e] @
    hidden[t])).

    hidden: [T, H]. logits: [T, E]. gate, up: [E, F, H]. down: [E, H, F]. experts: int [T, k] chosen beforehand, else
    the k largest of scores + bias. One expert after the other, each on its own tokens; shares are not quantized.
    Returns [T, H] of hidden's dtype. Source: DeepSeek-V3, equations 12 to 15 (arXiv:2412.19437).
    """
    every = scores_reference(logits, scores)
    if experts is None:
        experts = (every if bias is None else every + bias).topk(k, dim=-1).indices
    shares = every.gather(1, experts.long())
    if normalize:
        shares = shares / shares.sum(-1, keepdim=True)
    out = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
    for expert in range(gate.shape[0]):
        tokens, slots = torch.where(experts == expert)
        rows = hidden[tokens]
        inner = torch.nn.functional.silu(rows @ gate[expert].mT) * (rows @ up[expert].mT)
        mixed = (inner @ down[expert].mT) * shares[tokens, slots, None]
        out = out.index_add(0, tokens, mixed.to(out.dtype))
    return out.to(hidden.dtype)
