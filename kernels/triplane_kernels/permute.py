"""Token permutation for mixture-of-experts layers: rows sorted by expert, each expert's group padded to whole blocks.

    x [T, H], experts [T, k] --permute--> rows [P, H] in expert order --experts--> rows [P, H] --unpermute, weights-->
    [T, H]

P depends on shapes alone, so nothing waits for the device; rows after the last group are padding, too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from triplane_kernels.custom_ops import operator
from triplane_kernels.errors import KernelInputError
from triplane_kernels.machine import choose
from triplane_kernels.permute_reference import (
    gather_reference,
    padded_rows,
    plan_reference,
    scatter_reference,
    unpermute_backward_reference,
)
from triplane_kernels.tuning import workload

SHAPES = [(tokens, 8, width) for tokens in (4096, 16384, 65536) for width in (2048, 4096, 7168)]
TUNED_EXPERTS = 128


class Plan(NamedTuple):
    """Row of every (token, expert) pair."""

    offsets: Tensor
    """int32 [E + 1]: rows offsets[e] to offsets[e + 1] belong to expert e; all are multiples of the block."""
    source: Tensor
    """int32 [P]: the pair token * k + slot in each row, -1 in padding."""
    position: Tensor
    """int32 [T, k]: the row of each pair, -1 if it was dropped."""


class Permuted(NamedTuple):
    """Rows in expert order, and their sources."""

    rows: Tensor
    """[P, H], of x's dtype; padding rows are zeros."""
    offsets: Tensor
    """int32 [E + 1]: rows offsets[e] to offsets[e + 1] belong to expert e; all are multiples of the block."""
    source: Tensor
    """int32 [P]: the pair token * k + slot in each row, -1 in padding."""
    position: Tensor
    """int32 [T, k]: the row of each pair, -1 if it was dropped."""


def permute(x: Tensor, experts: Tensor, num_experts: int, *, block: int = 128) -> Permuted:
    """Copy every token's row to each of its experts' groups; differentiable in x.

    x: [T, H] of any dtype (FP8 codes and scales too). experts: int32 or int64 [T, k]; a pair whose expert is outside 0
    to num_experts - 1 is dropped. Inside a group tokens keep their order. P = (T k + min(T k, E) (block - 1)) rounded
    down to a multiple of block.
    Raises KernelInputError for shapes that don't fit.
    """
    plan = plan_permutation(experts, num_experts, block=block)
    return Permuted(permute_rows(x, plan), *plan)


def plan_permutation(experts: Tensor, num_experts: int, *, block: int = 128) -> Plan:
    """Plan of `permute` without rows, to permute several tensors of the same tokens (codes and their scales)."""
    if experts.dim() != 2 or experts.dtype not in (torch.int32, torch.int64):
        raise KernelInputError(
            f"permute: experts must be int32 or int64 [T, k], not {experts.dtype} {list(experts.shape)}"
        )
    if num_experts < 1 or block < 1:
        raise KernelInputError(f"permute: num_experts ({num_experts}) and block ({block}) must be at least 1")
    if padded_rows(experts.numel(), num_experts, block) >= 2**31:
        raise KernelInputError(
            f"permute: {experts.numel()} pairs of {num_experts} experts pass 2^31 rows; permute fewer tokens at a time"
        )
    return Plan(*_plan(experts.detach().int().contiguous(), num_experts, block))


def permute_rows(x: Tensor, plan: Plan | Permuted) -> Tensor:
    """Rows [P, H] of x [T, H] in the plan's order, zeros in padding; differentiable in x."""
    if x.dim() != 2 or x.shape[0] != plan.position.shape[0]:
        raise KernelInputError(
            f"permute: x must be [T, H] with the {plan.position.shape[0]} tokens of the plan, not {list(x.shape)}"
        )
    return _permute(x.contiguous(), plan.source, plan.position)


def unpermute(rows: Tensor, permuted: Permuted | Plan, weights: Tensor) -> Tensor:
    """Each token's rows, weighted and summed: out[t] = sum over j of weights[t, j] * rows[position[t, j]].

    rows: [P, H] float32, bfloat16 or float16. weights: [T, k] float32. Sums in slot order in float32; returns [T, H] of
    rows' dtype. Dropped pairs count as zeros. Differentiable in rows and weights; gradients of padding rows are zero.
    Raises KernelInputError for shapes that don't fit.
    """
    if rows.dim() != 2 or rows.shape[0] != permuted.source.shape[0] or weights.shape != permuted.position.shape:
        raise KernelInputError(
            f"unpermute: rows {list(rows.shape)} and weights {list(weights.shape)} must be [P, H] and [T, k] of the"
            f" plan, P {permuted.source.shape[0]} and [T, k] {list(permuted.position.shape)}"
        )
    return _unpermute(rows.contiguous(), permuted.source, permuted.position, weights.contiguous())


def _plan_fake(experts: Tensor, num_experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = padded_rows(experts.numel(), num_experts, block)
    return (
        experts.new_empty(num_experts + 1, dtype=torch.int32),
        experts.new_empty(rows, dtype=torch.int32),
        torch.empty_like(experts, dtype=torch.int32),
    )


@operator("permute_plan", fake=_plan_fake)
def _plan(experts: Tensor, num_experts: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
    if choose("permute", experts) == "reference":
        return plan_reference(experts, num_experts, block)
    from triplane_kernels.permute_triton import plan_triton

    return plan_triton(experts, num_experts, block)


def _permute_fake(x: Tensor, source: Tensor, position: Tensor) -> Tensor:
    return x.new_empty(source.shape[0], x.shape[1])


def _permute_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _permute_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    (position,) = ctx.saved_tensors
    return _gather(gradient.contiguous(), position), None, None


@operator("permute", fake=_permute_fake, save=_permute_save, backward=_permute_backward)
def _permute(x: Tensor, source: Tensor, position: Tensor) -> Tensor:
    if choose("permute", x, source, position) == "reference":
        return scatter_reference(x, source, position.shape[1])
    from triplane_kernels.permute_triton import scatter_triton

    return scatter_triton(x, source, position)


def _gather_fake(rows: Tensor, position: Tensor) -> Tensor:
    return rows.new_empty(position.shape[0], rows.shape[1])


@operator("permute_backward", fake=_gather_fake)
def _gather(rows: Tensor, position: Tensor) -> Tensor:
    if choose("permute_backward", rows, position) == "reference":
        return gather_reference(rows, position, None)
    from triplane_kernels.permute_triton import gather_triton

    return gather_triton(rows, position, None)


def _unpermute_fake(rows: Tensor, source: Tensor, position: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty(position.shape[0], rows.shape[1])


def _unpermute_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _unpermute_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, Tensor]:
    rows, source, position, weights = ctx.saved_tensors
    of_rows, of_weights = _unpermute_backward(gradient.contiguous(), rows, source, position, weights)
    return of_rows, None, None, of_weights


@operator("unpermute", fake=_unpermute_fake, save=_unpermute_save, backward=_unpermute_gradients)
def _unpermute(rows: Tensor, source: Tensor, position: Tensor, weights: Tensor) -> Tensor:
    if choose("unpermute", rows, source, position, weights) == "reference":
        return gather_reference(rows, position, weights)
    from triplane_kernels.permute_triton import gather_triton

    return gather_triton(rows, position, weights)


def _unpermute_backward_fake(
    gradient: Tensor, rows: Tensor, source: Tensor, position: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rows), torch.empty_like(weights)


@operator("unpermute_backward", fake=_unpermute_backward_fake)
def _unpermute_backward(
    gradient: Tensor, rows: Tensor, source: Tensor, position: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    if choose("unpermute_backward", gradient, rows, source, position, weights) == "reference":
        return unpermute_backward_reference(gradient, rows, source, position, weights)
    from triplane_kernels.permute_triton import unpermute_backward_triton

    return unpermute_backward_triton(gradient, rows, source, position, weights)


@workload("permute", SHAPES)
def _tune_permute(tokens: int, k: int, width: int) -> None:
    permute(*_drawn(tokens, k, width), TUNED_EXPERTS)


@workload("unpermute", SHAPES)
def _tune_unpermute(tokens: int, k: int, width: int) -> None:
    permuted = permute(*_drawn(tokens, k, width), TUNED_EXPERTS)
    unpermute(permuted.rows, permuted, torch.rand(tokens, k, device="cuda"))


@workload("unpermute_backward", SHAPES)
def _tune_unpermute_backward(tokens: int, k: int, width: int) -> None:
    permuted = permute(*_drawn(tokens, k, width), TUNED_EXPERTS)
    unpermute(permuted.rows.requires_grad_(), permuted, torch.rand(tokens, k, device="cuda")).sum().backward()  # type: ignore[no-untyped-call]


def _drawn(tokens: int, k: int, width: int) -> tuple[Tensor, Tensor]:
    experts = torch.rand(tokens, TUNED_EXPERTS, device="cuda").topk(k).indices
    return torch.randn(tokens, width, dtype=torch.bfloat16, device="cuda"), experts
