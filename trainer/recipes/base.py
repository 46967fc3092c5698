"""The recipe that all others change: float32 products of the leaves. Recipes `w8` and `fp32` differ in leaves alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from triplane_kernels.wide import grouped_product

from contracts.precision import Forward
from trainer.head import target_scores

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Experts:
    """Leaves of one layer's experts."""

    gate: Tensor
    """[experts, expert_width, hidden]."""
    up: Tensor
    """[experts, expert_width, hidden]."""
    down: Tensor
    """[experts, hidden, expert_width]."""


class Recipe:
    """Products of the forward pass and the dtype of what is between them. Differentiable in all tensors.

    Leaves are float32 tensors that hold values of the stored dtype, so that gradients add up in float32. A recipe that
    rounds computes in float64 on a CPU, as the built-in engine does: both then round the same numbers, whatever the
    order of their sums. A difference of float32's rounding would become one of bfloat16's or e4m3's.
    """

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.activations = DTYPES[forward.activations]

    def keep(self, leaf: Tensor, codes: Tensor, scales: Tensor) -> None:
        """The leaf is these dequantized codes, until it changes. A recipe that multiplies codes uses them: scales of an
        FP8 original may not be those that quantization of the leaf would choose.
        """

    def narrow(self, values: Tensor) -> Tensor:
        """`values` in the dtype of activations; the same tensor if it has that dtype."""
        return values.to(self.activations)

    def wide(self, values: Tensor) -> Tensor:
        """`values` in the dtype in which sums are computed; the same tensor if it has that dtype."""
        return values.double() if self.forward.rounds and not values.is_cuda else values.float()

    def rounded(self, values: Tensor) -> Tensor:
        """`values` as bfloat16 activations hold them, in the dtype of `wide`; float32 activations leave them alone."""
        return self.wide(self.narrow(values)) if self.activations == torch.bfloat16 else values

    def operand(self, rows: Tensor) -> Tensor:
        """Rows [tokens, columns] as a quantized projection reads them. rows: of the activations' dtype."""
        return self.wide(rows)

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        """rows [tokens, columns] @ weight [width, columns].T: a projection of the attention."""
        return self.narrow(F.linear(self.operand(rows), self.wide(weight)))

    def grouped(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """Product of each group of rows [slots, columns] with its matrix of weights [experts, width, columns].

        ends: int32 [experts], one past the last row of each expert's group.
        """
        return self.narrow(grouped_product(self.operand(rows), self.wide(weights).mT, ends))

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention over [1, heads, tokens, head_dim]; key and value may have fewer heads."""
        grouped = query.shape[1] != key.shape[1]
        if not query.is_cuda:
            query, key, value = self.wide(query), self.wide(key), self.wide(value)
        return self.narrow(F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped))

    def router(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Logits [tokens, experts] of rows [tokens, hidden], in the dtype of `wide`."""
        dtype = DTYPES[self.forward.router_dtype]
        if dtype == torch.float32:
            return F.linear(self.wide(rows), self.wide(weight))
        return self.wide(F.linear(self.wide(rows.to(dtype)), self.wide(weight.to(dtype))).to(dtype))

    def head(
        self, rows: Tensor, weight: Tensor, targets: Tensor, temperature: float, allowed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log probability of each target and entropy, as `trainer.head.target_scores` of rows [scored, hidden]."""
        dtype = torch.bfloat16 if self.forward.head_dtype == "bfloat16" else None
        return target_scores(*self.head_operands(rows, weight), targets, temperature, dtype, allowed)

    def head_operands(self, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """rows and weight in one dtype that holds the values of both: narrow on a GPU, which sums in float32 anyway."""
        if rows.is_cuda and rows.dtype == torch.bfloat16:
            return rows, weight.to(rows.dtype)
        return rows.float(), weight

    def mixture(self, rows: Tensor, shares: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        """Sum of each token's experts, weighted by `shares`; without the residual.

        rows [tokens, hidden]; shares [tokens, picks]; chosen: int64 [tokens, picks].
        """
        order, back = by_expert(chosen)
        ends = torch.bincount(chosen.reshape(-1), minlength=len(experts.gate)).cumsum(0).int()
        routed = rows[order // chosen.shape[1]]
        gate = self.grouped(routed, experts.gate, ends)
        up = self.grouped(routed, experts.up, ends)
        inner = self.narrow(F.silu(self.wide(gate))) * up
        out = self.grouped(inner, experts.down, ends)
        return self.narrow((out[back].view(*chosen.shape, -1) * shares[..., None]).sum(1))


def by_expert(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Permutation that sorts the slots of `chosen`, int64 [tokens, picks], by expert, and its inverse; int64 [slots]
    each.
    """
    order = chosen.reshape(-1).argsort(stable=True)
    return order, torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
