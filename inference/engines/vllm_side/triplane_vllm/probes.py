"""Compare a layer's output on chosen inputs with the checkpoint's, which also tests the order in which a kernel reads
weights.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 512
"""Rows of the identity, or of probes, per call."""
PER_EXPERT = 4
_ROUTED_LOGIT = 30.0
"""Router logit of a probe's expert if the kernel does the routing; the others, with logit 0, get e^-30."""


def linear_error(layer: Any, expected: Tensor) -> float:
    """Largest difference between the matrix that `layer` multiplies by and `expected` [N, K], as a share of the largest
    weight.

    The layer applied to the identity returns its matrix, in any storage format. Infinite if an output is not finite.
    """
    kind, device = layer.weight.dtype, layer.weight.device
    kind = kind if kind.is_floating_point and kind.itemsize > 1 else torch.bfloat16
    worst = 0.0
    for start in range(0, expected.shape[1], ROWS):
        width = min(ROWS, expected.shape[1] - start)
        probe = torch.zeros(width, expected.shape[1], dtype=kind, device=device)
        probe[torch.arange(width), start + torch.arange(width)] = 1.0
        found = layer.quant_method.apply(layer, probe, bias=None)[:, : expected.shape[0]]
        if not bool(torch.isfinite(found).all()):
            return math.inf
        wanted = expected[:, start : start + width].T.to(found.device)
        worst = max(worst, float((found.float() - wanted).abs().max()))
    return worst / max(float(expected.abs().max()), 1e-30)


def expert_errors(
    layer: Any, experts: list[int], weights: list[tuple[Tensor, Tensor, Tensor]], kind: torch.dtype
) -> list[float]:
    """Relative error of each expert's output on random probes; infinite if an output is not finite. weights: (gate [I,
    H], up [I, H], down [H, I]) of each expert, float32.
    """
    hidden, device = weights[0][0].shape[1], layer.w13_weight.device
    random = torch.Generator().manual_seed(0)
    probes = torch.randn(len(experts), PER_EXPERT, hidden, generator=random).to(kind)
    flat = probes.flatten(0, 1).to(device)
    owners = torch.tensor(experts).repeat_interleave(PER_EXPERT).to(device)
    found = torch.cat(
        [_routed(layer, flat[at : at + ROWS], owners[at : at + ROWS]) for at in range(0, len(flat), ROWS)]
    )
    errors = []
    for x, y, (gate, up, down) in zip(probes.float(), found.float().cpu().view(probes.shape), weights, strict=True):
        wanted = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
        error = float((y - wanted).norm() / wanted.norm().clamp_min(1e-30))
        errors.append(error if math.isfinite(error) else math.inf)
    return errors


def _routed(layer: Any, x: Tensor, owners: Tensor) -> Tensor:
    """The layer's output with every row routed to its owner only."""
    method, count = layer.quant_method, layer.global_num_experts
    if method.is_monolithic:
        logits = F.one_hot(owners, count).to(x.dtype) * _ROUTED_LOGIT
        return method.apply_monolithic(layer=layer, x=x, router_logits=logits)  # type: ignore[no-any-return]  # vLLM's
    places = (owners[:, None] + torch.arange(layer.top_k, device=x.device)) % count
    shares = torch.zeros(places.shape, dtype=torch.float32, device=x.device)
    shares[:, 0] = 1.0
    return method.apply(  # type: ignore[no-any-return]  # vLLM's
        layer=layer,
        x=x,
        topk_weights=shares,
        topk_ids=places.to(method.topk_indices_dtype or torch.int32),
        shared_experts=None,
        shared_experts_input=None,
    )
