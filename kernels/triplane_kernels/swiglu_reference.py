"""SwiGLU, alone and quantized, in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from triplane_kernels import quantize_reference


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [P, F] of gate_up [P, 2F]."""
    gate, up = gate_up.chunk(2, dim=1)
    return _silu(gate) * up


def swiglu_backward(gradient: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of gate_up [P, 2F] from that of the output [P, F]."""
    return _swiglu_backward(gradient, gate_up).to(gate_up.dtype)


def swiglu_quantized(gate_up: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Codes [P, F] and scales [P, ceil(F/128)] of the output."""
    return quantize_reference.quantize_activations(swiglu(gate_up), power_of_two, None)


def swiglu_backward_quantized(gradient: Tensor, gate_up: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of gate_up [P, 2F], and its codes [P, 2F] and scales [P, ceil(2F/128)] from unrounded values."""
    slopes = _swiglu_backward(gradient, gate_up)
    return slopes.to(gate_up.dtype), *quantize_reference.quantize_activations(slopes, power_of_two, None)


def _silu(gate: Tensor) -> Tensor:
    """silu(gate), computed in float32 or wider and rounded to gate's dtype."""
    wide = _wide(gate)
    return (wide * wide.sigmoid()).to(gate.dtype)


def _swiglu_backward(gradient: Tensor, gate_up: Tensor) -> Tensor:
    """In float32 or wider; straight through the roundings."""
    narrow_gate, _ = gate_up.chunk(2, dim=1)
    gate, up = _wide(gate_up).chunk(2, dim=1)
    gradient = gradient.to(gate.dtype)
    sigmoid = gate.sigmoid()
    of_gate = gradient * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([of_gate, gradient * _silu(narrow_gate)], dim=1)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
