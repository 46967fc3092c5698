"""A mixture-of-experts layer whose matrix products run on FP8 blocks, differentiable, with weights quantized once an optimizer step.

    hidden [T, H], logits [T, E] --route, permute--> rows [P, H], shares [T, k]
      rows --quantize 1x128--> grouped product with gate_up --SwiGLU, quantize--> grouped product with down --> rows [P, H]
      rows, shares --unpermute--> [T, H]

Backward: dgrad reads the same codes transposed (their blocks are square); gradients of the weights go straight through to the masters.
Groups stay on the device from the router to the last product: nothing waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from triplane_kernels.custom_ops import operator
from triplane_kernels.errors import KernelInputError
from triplane_kernels.grouped_gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad
from triplane_kernels.moe_weights import ExpertWeights
from triplane_kernels.permute import permute, unpermute
from triplane_kernels.quantize import dequantize_weights, quantize_activations
from triplane_kernels.router import route
from triplane_kernels.swiglu import swiglu, swiglu_backward, swiglu_backward_quantized, swiglu_quantized


@dataclass(frozen=True)
class Recipe:
    """Which products take FP8 operands; the others take operands of the rows' dtype, with quantized weights as their codes' values."""

    forward: bool = True
    """Activations in 1x128 blocks against the weights' codes: recipe w8a8-1x128. False with quantized weights: recipe w8."""
    dgrad: bool = True
    """Gradients in 1x128 blocks against the same codes."""
    wgrad: bool = False
    """Gradients and activations in blocks of 128 rows. Off: FP8 on both sides here costs the most accuracy, and the product is as wide as tokens."""
    power_of_two: bool = False
    """Scales of activations and gradients rounded up to powers of two."""


BF16 = Recipe(forward=False, dgrad=False, wgrad=False)
"""No FP8 product; with `ExpertWeights.full`, the unquantized twin."""


def expert_layer(
    hidden: Tensor,
    logits: Tensor,
    weights: ExpertWeights,
    k: int,
    *,
    bias: Tensor | None = None,
    scores: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True,
    recipe: Recipe = Recipe(),
) -> Tensor:
    """Each token through its k experts, weighted by the router's shares and summed; without the residual.

    hidden: [T, H] bfloat16 or float32 (float64 on the reference). logits: [T, E], the router's. bias, scores, normalize: as in
    `route`. Returns [T, H] of hidden's dtype, differentiable in hidden, logits and the weights' gate, up and down. Raises
    KernelInputError for shapes that don't fit, and for an FP8 product with weights that are not quantized. Source: DeepSeek-V3,
    equations 12 to 15 and section 3.3 (arXiv:2412.19437).
    """
    if logits.dim() != 2 or logits.shape != (hidden.shape[0], weights.gate.shape[0]):
        raise KernelInputError(
            f"expert layer: logits must be [T, E] with {hidden.shape[0]} tokens and {weights.gate.shape[0]} experts, "
            f"not {list(logits.shape)}"
        )
    shares, experts = route(logits, k, bias=bias, scores=scores, normalize=normalize)
    permuted = permute(hidden, experts, weights.gate.shape[0])
    return unpermute(expert_mlp(permuted.rows, weights, permuted.offsets, recipe), permuted, shares)


def expert_mlp(rows: Tensor, weights: ExpertWeights, offsets: Tensor, recipe: Recipe = Recipe()) -> Tensor:
    """down[g] @ (silu(gate[g] @ row) * (up[g] @ row)) for every row of every group.

    rows: [P, H]; group g holds rows offsets[g] to offsets[g + 1], offsets int32 [E + 1] on rows' device, multiples of 128. Returns [P, H] of
    rows' dtype. Differentiable in rows and the weights' gate, up and down.
    """
    if rows.dim() != 2 or rows.shape[1] != weights.gate.shape[2]:
        raise KernelInputError(f"expert layer: rows must be [P, {weights.gate.shape[2]}], not {list(rows.shape)}")
    if (recipe.forward or recipe.dgrad) and not weights.quantized:
        raise KernelInputError(
            "expert layer: an FP8 product needs quantized weights: use ExpertWeights.quantize, or the recipe BF16"
        )
    out, _ = _expert_mlp(
        rows, weights.gate, weights.up, weights.down,
        weights.gate_up_operand, weights.gate_up_scales, weights.down_operand, weights.down_scales,
        offsets, recipe.forward, recipe.dgrad, recipe.wgrad, recipe.power_of_two,
    )  # fmt: skip
    return out


def _fake(
    rows: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_up_operand: Tensor,
    gate_up_scales: Tensor | None,
    down_operand: Tensor,
    down_scales: Tensor | None,
    offsets: Tensor,
    forward: bool,
    dgrad: bool,
    wgrad: bool,
    power_of_two: bool,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), rows.new_empty(rows.shape[0], gate_up_operand.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, gate, up, down, *operands, offsets, _, dgrad, wgrad, power_of_two = inputs
    ctx.save_for_backward(rows, output[1], *operands, offsets)
    ctx.set_materialize_grads(False)
    ctx.width, ctx.dtypes = gate.shape[1], (gate.dtype, up.dtype, down.dtype)
    ctx.dgrad, ctx.wgrad, ctx.power_of_two = dgrad, wgrad, power_of_two


def _backward(ctx: Any, gradient: Tensor, of_inner: Tensor | None) -> tuple[Tensor | None, ...]:
    rows, gate_up, gate_up_operand, gate_up_scales, down_operand, down_scales, offsets = ctx.saved_tensors
    needs_rows, *needs_weights = ctx.needs_input_grad[:4]
    gradient, dtype = gradient.contiguous(), rows.dtype
    if ctx.dgrad and gate_up_scales is not None and down_scales is not None:
        codes = quantize_activations(gradient, power_of_two=ctx.power_of_two)
        of_inner = grouped_gemm_dgrad(codes, (down_operand, down_scales), offsets, out_dtype=dtype)
        of_gate_up, *codes = swiglu_backward_quantized(of_inner, gate_up, power_of_two=ctx.power_of_two)
        left, right = (codes[0], codes[1]), (gate_up_operand, gate_up_scales)
    else:
        of_inner = grouped_gemm_dgrad(gradient, _values(down_operand, down_scales, dtype), offsets, out_dtype=dtype)
        of_gate_up = swiglu_backward(of_inner, gate_up)
        left, right = of_gate_up, _values(gate_up_operand, gate_up_scales, dtype) if needs_rows else of_gate_up
    of_rows = grouped_gemm_dgrad(left, right, offsets, out_dtype=dtype) if needs_rows else None
    weights = _weight_gradients(ctx, gradient, rows, gate_up, of_gate_up, offsets) if any(needs_weights) else [None] * 3
    return (of_rows, *weights, *([None] * 9))


def _weight_gradients(
    ctx: Any, gradient: Tensor, rows: Tensor, gate_up: Tensor, of_gate_up: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of gate, up [E, F, H] and down [E, H, F], without what fills blocks, in the masters' dtypes."""
    width, (gate, up, down) = ctx.width, ctx.dtypes
    joined = _wgrad(ctx, of_gate_up, rows, offsets, gate)
    padded = joined.shape[1] // 2
    of_down = _wgrad(ctx, gradient, swiglu(gate_up), offsets, down)[:, :, :width]
    return joined[:, :width].to(gate), joined[:, padded : padded + width].to(up), of_down.to(down)


def _wgrad(ctx: Any, gradient: Tensor, rows: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    return grouped_gemm_wgrad(gradient, rows, offsets, out_dtype=dtype)


@operator("expert_mlp", fake=_fake, save=_save, backward=_backward)
def _expert_mlp(
    rows: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_up_operand: Tensor,
    gate_up_scales: Tensor | None,
    down_operand: Tensor,
    down_scales: Tensor | None,
    offsets: Tensor,
    forward: bool,
    dgrad: bool,
    wgrad: bool,
    power_of_two: bool,
) -> tuple[Tensor, Tensor]:
    dtype = rows.dtype
    if forward and gate_up_scales is not None and down_scales is not None:
        codes = quantize_activations(rows, power_of_two=power_of_two)
        gate_up = grouped_gemm(codes, (gate_up_operand, gate_up_scales), offsets, out_dtype=dtype)
        inner = swiglu_quantized(gate_up, power_of_two=power_of_two)
        return grouped_gemm(inner, (down_operand, down_scales), offsets, out_dtype=dtype), gate_up
    gate_up = grouped_gemm(rows, _values(gate_up_operand, gate_up_scales, dtype), offsets, out_dtype=dtype)
    out = grouped_gemm(swiglu(gate_up), _values(down_operand, down_scales, dtype), offsets, out_dtype=dtype)
    return out, gate_up


def _values(operand: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The values that an operand stands for, in `dtype`."""
    return operand.to(dtype) if scales is None else dequantize_weights(operand, scales).to(dtype)
