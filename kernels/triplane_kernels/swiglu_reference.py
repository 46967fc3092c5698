"""SwiGLU in plain torch, on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu_reference(gate_up: Tensor, out_dtype: torch.dtype) -> Tensor:
    """silu(gate) * up [P, F] of gate_up [P, 2F], computed in float32 or wider."""
    gate, up = _halves(gate_up)
    return (gate * gate.sigmoid() * up).to(out_dtype)


def swiglu_backward_reference(gradient: Tensor, gate_up: Tensor, out_dtype: torch.dtype) -> Tensor:
    """Gradient of gate_up [P, 2F] from that of the output [P, F]."""
    gate, up = _halves(gate_up)
    gradient = gradient.to(gate.dtype)
    sigmoid = gate.sigmoid()
    of_gate = gradient * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([of_gate, gradient * gate * sigmoid], dim=1).to(out_dtype)


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=1)
    return gate, up
