"""Recipe `fp8-block`: projections, expert layer and output head of `triplane_kernels`, with products in FP8 blocks.

Forward and dgrad multiply FP8 codes; wgrad of the experts too if the setting says so. On a CPU the kernels' torch
references compute the same. Codes are made from the leaves once an optimizer step: leaves are dequantized codes, and
quantize to the exported ones again. Those of a loaded checkpoint are used as they are.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from triplane_kernels.gemm import gemm
from triplane_kernels.loss_head import loss_head
from triplane_kernels.moe import Recipe as Products
from triplane_kernels.moe_weights import ExpertWeights
from triplane_kernels.quantize import quantize_activations, quantize_weights, quantize_weights_both, transpose_codes

from contracts.precision import Forward
from trainer.recipes.base import Experts, Recipe
from trainer.recipes.mixture import kernel_mixture


class Fp8BlockRecipe(Recipe):
    """See the module. Holds codes of the leaves until they change."""

    def __init__(self, forward: Forward, *, wgrad: bool) -> None:
        super().__init__(forward)
        self._products = Products(wgrad=wgrad)
        self._made: MutableMapping[Tensor, tuple[tuple[int, ...], Any]] = WeakIdKeyDictionary()
        """Leaf -> (versions of the leaves that its codes are made of, codes)."""
        self._kept: MutableMapping[Tensor, tuple[int, Tensor, Tensor]] = WeakIdKeyDictionary()
        """Leaf -> (its version, codes, scales), until they are used."""

    def keep(self, leaf: Tensor, codes: Tensor, scales: Tensor) -> None:
        """See Recipe.keep."""
        self._kept[leaf] = leaf._version, codes, scales

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        """See Recipe.linear."""
        codes = self._codes((weight,), lambda: self._both(weight))
        found: Tensor = _Linear.apply(rows, weight, *codes)  # type: ignore[no-untyped-call]
        return found

    def mixture(self, rows: Tensor, shares: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        """See Recipe.mixture."""
        return kernel_mixture(rows, shares, chosen, self.weights(experts), self._products)

    def head(
        self, rows: Tensor, weight: Tensor, targets: Tensor, temperature: float, allowed: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See Recipe.head."""
        if self.forward.head_dtype != "float32":
            return super().head(rows, weight, targets, temperature, allowed)
        operands = self.head_operands(rows, weight)
        logprobs, entropy = loss_head(*operands, targets, temperature=temperature, allowed=allowed)
        return logprobs, entropy.detach()

    def weights(self, experts: Experts) -> ExpertWeights:
        """The codes of a layer's experts; gradients go to the leaves."""
        leaves = experts.gate, experts.up, experts.down
        codes: ExpertWeights = self._codes(leaves, lambda: self._of_experts(*leaves))
        return replace(codes, gate=experts.gate, up=experts.up, down=experts.down)

    def _codes(self, leaves: tuple[Tensor, ...], make: Callable[[], Any]) -> Any:
        versions = tuple(leaf._version for leaf in leaves)
        held = self._made.get(leaves[0])
        if held is None or held[0] != versions:
            held = versions, make()
            self._made[leaves[0]] = held
        return held[1]

    def _both(self, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes and scales of a projection, and both transposed."""
        kept = self._taken(weight)
        if kept is None:
            return quantize_weights_both(weight.detach())
        codes, scales = kept
        return codes, scales, transpose_codes(codes), scales.t().contiguous()

    def _of_experts(self, gate: Tensor, up: Tensor, down: Tensor) -> ExpertWeights:
        leaves = {"gate": gate.detach(), "up": up.detach(), "down": down.detach()}
        kept = {"gate": self._taken(gate), "up": self._taken(up), "down": self._taken(down)}
        codes = {name: kept[name] or quantize_weights(leaf) for name, leaf in leaves.items()}
        return ExpertWeights.from_codes(**leaves, codes=codes)

    def _taken(self, leaf: Tensor) -> tuple[Tensor, Tensor] | None:
        """Copies of the codes and scales that were kept for a leaf, unless it has changed."""
        version, *kept = self._kept.pop(leaf, (-1,))
        return (kept[0].clone(), kept[1].clone()) if version == leaf._version else None


class _Linear(torch.autograd.Function):
    """Projection whose forward and dgrad multiply FP8 codes, and whose wgrad multiplies values of rows' dtype."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, codes: Tensor, scales: Tensor, turned: Tensor, turned_scales: Tensor
    ) -> Tensor:
        ctx.save_for_backward(rows, turned, turned_scales)
        return gemm(quantize_activations(rows), (codes, scales), out_dtype=rows.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows, turned, turned_scales = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        of_rows = gemm(quantize_activations(gradient), (turned, turned_scales), out_dtype=rows.dtype)
        return of_rows, gemm(gradient.t(), rows.t(), out_dtype=torch.float32), None, None, None, None
