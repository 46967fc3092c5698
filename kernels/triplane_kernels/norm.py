"""Root mean square norm of rows, and the rotary position embedding of heads, alone or fused.

x [T, N, D] --divide by sqrt(mean(x^2) + eps), times weight--> y --rotate by the token's angles--> [T, N, D]

Sources: Zhang and Sennrich (arXiv:1910.07467), Su et al. (arXiv:2104.09864), halves layout.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from triplane_kernels import norm_reference
from triplane_kernels.custom_ops import operator
from triplane_kernels.errors import KernelInputError
from triplane_kernels.machine import choose
from triplane_kernels.tuning import workload

SHAPES = [(16384, 2048), (16384, 4096), (65536, 128), (524288, 128)]
"""Rows and columns: hidden states, and heads of keys and queries."""
Rotary = tuple[Tensor, Tensor]
"""Cosine and sine, each [T, 1, D] float32: of a token's angle for every column."""


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 0.0, rotary: Rotary | None = None) -> Tensor:
    """The norm of every row of x along its last dimension, then its rotation by `rotary`.

    x: [T, D] or [T, N, D] float32 or bfloat16 (float64 on the reference). weight: [D] of any float dtype; None: no
    norm, the rotation alone. rotary: needs [T, N, D] with an even D. Returns x's shape and dtype. Computed in float32
    (float64 for float64), and rounded to x's dtype where `transformers` does: x over its root mean square, its product
    with the weight, cosine, sine, and their products. Gradients pass straight through the roundings. Differentiable in
    x and weight. Raises KernelInputError for shapes that don't fit.
    """
    columns = x.shape[-1] if x.dim() in (2, 3) else 0
    if not columns or not x.is_floating_point() or (weight is not None and weight.shape != (columns,)):
        of = "" if weight is None else f", weight {list(weight.shape)}"
        raise KernelInputError(f"rms_norm: x must be [T, D] or [T, N, D], weight [D], not x {list(x.shape)}{of}")
    wanted = (x.shape[0], 1, columns)
    if rotary is not None and (x.dim() != 3 or columns % 2 or any(part.shape != wanted for part in rotary)):
        raise KernelInputError(
            f"rms_norm: for x {list(x.shape)}, cosine and sine must be [T, 1, D] with an even D, not"
            f" {' and '.join(str(list(part.shape)) for part in rotary)}"
        )
    cosine, sine = rotary or (None, None)
    return _rms_norm(x.contiguous(), None if weight is None else weight.contiguous(), cosine, sine, eps)


def _way(op: str, *tensors: Tensor | None) -> ModuleType:
    if choose(op, *(tensor for tensor in tensors if tensor is not None)) == "reference":
        return norm_reference
    from triplane_kernels import norm_triton

    return norm_triton


def _fake(x: Tensor, weight: Tensor | None, cosine: Tensor | None, sine: Tensor | None, eps: float) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, cosine, sine = ctx.saved_tensors
    of_x, of_weight = _rms_norm_backward(gradient.contiguous(), x, weight, cosine, sine, ctx.eps)
    return of_x, None if weight is None else of_weight.to(weight.dtype), None, None, None


@operator("rms_norm", fake=_fake, save=_save, backward=_gradient)
def _rms_norm(x: Tensor, weight: Tensor | None, cosine: Tensor | None, sine: Tensor | None, eps: float) -> Tensor:
    out: Tensor = _way("rms_norm", x, weight, cosine, sine).rms_norm(x, weight, cosine, sine, eps)
    return out


def _backward_fake(
    gradient: Tensor, x: Tensor, weight: Tensor | None, cosine: Tensor | None, sine: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    columns = 0 if weight is None else x.shape[-1]
    return torch.empty_like(x), x.new_empty(columns, dtype=torch.promote_types(x.dtype, torch.float32))


@operator("rms_norm_backward", fake=_backward_fake)
def _rms_norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, cosine: Tensor | None, sine: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    way = _way("rms_norm_backward", gradient, x, weight, cosine, sine)
    of_x, of_weight = way.rms_norm_backward(gradient, x, weight, cosine, sine, eps)
    return of_x, of_weight


@workload("rms_norm", SHAPES)
def _tune(rows: int, columns: int) -> None:
    weight = torch.ones(columns, device="cuda", requires_grad=True)
    x = torch.randn(rows, 1, columns, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    angles = None if columns > 256 else (torch.randn(rows, 1, columns, device="cuda"),) * 2
    out = rms_norm(x, weight, 1e-6, angles)
    torch.autograd.grad(out, (x, weight), torch.randn_like(out))
