"""Differentiable mixture-of-experts layer with matrix products in FP8 blocks; weights are quantized once per optimizer
step.

    hidden [T, H], logits [T, E] --route, permute--> rows [P, H], shares [T, k]
      rows --quantize 1x128--> grouped product with gate_up --SwiGLU, quantize--> grouped product with down --> rows [P,
      H] rows, shares --unpermute--> [T, H]

Backward: dgrad reads the same codes, transposed once per optimizer step (blocks are square, so the scales are the
same); gradients of the weights go straight through to the masters. Groups stay on the device from the router to the
last product, so nothing waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from triplane_kernels.custom_ops import operator
from triplane_kernels.errors import KernelInputError
from triplane_kernels.grouped_gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad
from triplane_kernels.moe_weights import ExpertWeights
from triplane_kernels.operands import Operand
from triplane_kernels.permute import permute, unpermute
from triplane_kernels.quantize import dequantize_weights, quantize_activations, quantize_both
from triplane_kernels.router import route
from triplane_kernels.swiglu import swiglu, swiglu_backward, swiglu_backward_quantized, swiglu_quantized


@dataclass(frozen=True)
class Recipe:
    """Products with FP8 operands; the others use operands of the rows' dtype, with quantized weights dequantized."""

    forward: bool = True
    """Activations in 1x128 blocks against the weights' codes: recipe w8a8-1x128. False with quantized weights: recipe
    w8.
    """
    dgrad: bool = True
    """Gradients in 1x128 blocks against the same codes."""
    wgrad: bool = False
    """Gradients and activations in blocks of 128 rows. Off by default, since FP8 on both sides loses the most accuracy
    here.
    """
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
    """Sum of each token's k experts, weighted by the router's shares; without the residual.

    hidden: [T, H] bfloat16 or float32 (float64 on the reference). logits: [T, E], the router's. bias, scores,
    normalize: as in `route`. Returns [T, H] of hidden's dtype, differentiable in hidden, logits and the weights' gate,
    up and down. Raises KernelInputError for shapes that don't fit, and for an FP8 product with weights that are not
    quantized. Source: DeepSeek-V3, equations 12 to 15 and section 3.3 (arXiv:2412.19437).
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

    rows: [P, H]; group g holds rows offsets[g] to offsets[g + 1], offsets int32 [E + 1] on rows' device, multiples of
    128. Returns [P, H] of rows' dtype. Differentiable in rows and the weights' gate, up and down.
    """
    if rows.dim() != 2 or rows.shape[1] != weights.gate.shape[2]:
        raise KernelInputError(f"expert layer: rows must be [P, {weights.gate.shape[2]}], not {list(rows.shape)}")
    if (recipe.forward or recipe.dgrad) and not weights.quantized:
        raise KernelInputError(
            "expert layer: an FP8 product needs quantized weights: use ExpertWeights.quantize, or the recipe BF16"
        )
    out, _ = _expert_mlp(
        rows,
        weights.gate,
        weights.up,
        weights.down,
        weights.gate_up_operand,
        weights.gate_up_scales,
        weights.gate_up_turned,
        weights.down_operand,
        weights.down_scales,
        weights.down_turned,
        offsets,
        recipe.forward,
        recipe.dgrad,
        recipe.wgrad,
        recipe.power_of_two,
    )
    return out


def _fake(*inputs: Any) -> tuple[Tensor, Tensor]:
    rows, gate_up_operand = inputs[0], inputs[4]
    return torch.empty_like(rows), rows.new_empty(rows.shape[0], gate_up_operand.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    rows, gate, up, down, *operands, offsets, _, dgrad, wgrad, power_of_two = inputs
    ctx.save_for_backward(rows, output[1], *operands, offsets)
    ctx.set_materialize_grads(False)
    ctx.width, ctx.dtypes = gate.shape[1], (gate.dtype, up.dtype, down.dtype)
    ctx.dgrad, ctx.wgrad, ctx.power_of_two = dgrad, wgrad, power_of_two


def _backward(ctx: Any, gradient: Tensor, unused: Tensor | None) -> tuple[Tensor | None, ...]:
    rows, gate_up, joined, joined_scales, joined_turned, down, down_scales, down_turned, offsets = ctx.saved_tensors
    needs_rows, *needs_weights = ctx.needs_input_grad[:4]
    of_out = _sides(ctx, gradient.contiguous())
    of_inner = _dgrad(of_out.along, down, down_scales, down_turned, offsets, rows.dtype)
    if ctx.dgrad and not ctx.wgrad:
        values, *quantized = swiglu_backward_quantized(of_inner, gate_up, power_of_two=ctx.power_of_two)
        of_gate_up = _Sides((quantized[0], quantized[1]), values)
    else:
        of_gate_up = _sides(ctx, swiglu_backward(of_inner, gate_up))
    of_rows = of_gate = of_up = of_down = None
    if needs_rows:
        of_rows = _dgrad(of_gate_up.along, joined, joined_scales, joined_turned, offsets, rows.dtype)
    if any(needs_weights):
        width, padded, (gate, up, narrow) = ctx.width, joined.shape[1] // 2, ctx.dtypes
        found = grouped_gemm_wgrad(of_gate_up.across, _across(ctx, rows), offsets, out_dtype=gate)
        of_gate, of_up = found[:, :width], found[:, padded : padded + width].to(up)
        inner = _across(ctx, swiglu(gate_up))
        of_down = grouped_gemm_wgrad(of_out.across, inner, offsets, out_dtype=narrow)[:, :, :width]
    return (of_rows, of_gate, of_up, of_down, *([None] * 11))


class _Sides(NamedTuple):
    """A gradient [P, N] for dgrad and for wgrad: plain, or codes with their scales."""

    along: Operand
    """Quantized in blocks of 128 columns."""
    across: Operand
    """Quantized in blocks of 128 rows, and transposed."""


def _sides(ctx: Any, gradient: Tensor) -> _Sides:
    if not ctx.wgrad:
        return _Sides(
            quantize_activations(gradient, power_of_two=ctx.power_of_two) if ctx.dgrad else gradient, gradient
        )
    codes, scales, *turned = quantize_both(gradient, power_of_two=ctx.power_of_two)
    return _Sides((codes, scales) if ctx.dgrad else gradient, (turned[0], turned[1]))


def _across(ctx: Any, matrix: Tensor) -> Operand:
    """Activations in the layout for wgrad."""
    return quantize_both(matrix, power_of_two=ctx.power_of_two)[2:] if ctx.wgrad else matrix


def _dgrad(
    gradient: Operand,
    operand: Tensor,
    scales: Tensor | None,
    turned: Tensor | None,
    offsets: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    if isinstance(gradient, tuple) and scales is not None and turned is not None:
        return grouped_gemm_dgrad(gradient, (turned, scales.mT), offsets, transposed=True, out_dtype=dtype)
    return grouped_gemm_dgrad(gradient, _values(operand, scales, dtype), offsets, out_dtype=dtype)


@operator("expert_mlp", fake=_fake, save=_save, backward=_backward)
def _expert_mlp(
    rows: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    gate_up_operand: Tensor,
    gate_up_scales: Tensor | None,
    gate_up_turned: Tensor | None,
    down_operand: Tensor,
    down_scales: Tensor | None,
    down_turned: Tensor | None,
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
    """Dequantized values of an operand, in `dtype`."""
    if scales is None:
        return operand.to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return dequantize_weights(operand, scales, wide).to(dtype)
