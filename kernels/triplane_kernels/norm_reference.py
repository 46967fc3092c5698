"""Norm and rotation in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, cosine: Tensor | None, sine: Tensor | None, eps: float) -> Tensor:
    """x [..., D] normalized, if there is a weight [D], and rotated, if there are angles."""
    values = _wide(x)
    if weight is not None:
        values = _rounded(values * _inverse(values, eps), x) * weight.to(values.dtype)
    if cosine is not None and sine is not None:
        values = _rounded(values, x)
        values = _rounded(values * _rounded(cosine, x), x) + _rounded(_turned(values) * _rounded(sine, x), x)
    return values.to(x.dtype)


def rms_norm_backward(
    gradient: Tensor, x: Tensor, weight: Tensor | None, cosine: Tensor | None, sine: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Gradients of x, and of weight in float32 or wider, summed over all rows; [0] without a weight. They pass straight
    through the roundings.
    """
    values, slope = _wide(x), _wide(gradient)
    if cosine is not None and sine is not None:
        slope = slope * _rounded(cosine, x) - _turned(slope * _rounded(sine, x))
    if weight is None:
        return slope.to(x.dtype), values.new_empty(0)
    inverse = _inverse(values, eps)
    normal = values * inverse
    of_weight = (slope * _rounded(normal, x)).flatten(0, -2).sum(0)
    slope = slope * weight.to(values.dtype)
    return (inverse * (slope - normal * (slope * normal).mean(-1, keepdim=True))).to(x.dtype), of_weight


def _rounded(values: Tensor, x: Tensor) -> Tensor:
    """`values`, rounded to x's dtype, in the dtype in which x is computed."""
    return _wide(values.to(x.dtype))


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _inverse(values: Tensor, eps: float) -> Tensor:
    """One over the root mean square of each row."""
    return (values.square().mean(-1, keepdim=True) + eps).rsqrt()


def _turned(values: Tensor) -> Tensor:
    """(-second half, first half) of the last dimension: each pair of coordinates turned by a right angle."""
    first, second = values.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
