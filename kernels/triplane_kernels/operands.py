"""The two operands of a matrix product, for the public functions and all implementations."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from triplane_kernels.errors import KernelInputError

Operand = Tensor | tuple[Tensor, Tensor]
"""A plain tensor, or float8_e4m3fn codes with their float32 scales."""
PLAIN = (torch.bfloat16, torch.float32, torch.float64)
Flat = tuple[Tensor, Tensor | None, Tensor, Tensor | None]


@dataclass(frozen=True)
class Operands:
    """Both operands, of one kind and dtype: codes with scales, or plain values."""

    a: Tensor
    a_scales: Tensor | None
    b: Tensor
    b_scales: Tensor | None

    @classmethod
    def check(cls, op: str, one: Operand, other: Operand) -> Operands:
        """The operands of `op`. Raises KernelInputError unless they are of one kind and dtype."""
        values, scales = one if isinstance(one, tuple) else (one, None)
        others, other_scales = other if isinstance(other, tuple) else (other, None)
        if (scales is None) != (other_scales is None):
            raise KernelInputError(f"{op}: one operand is quantized and the other is not; quantize both or neither")
        allowed = PLAIN if scales is None else (torch.float8_e4m3fn,)
        if values.dtype != others.dtype or values.dtype not in allowed:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise KernelInputError(f"{op}: operands are {values.dtype} and {others.dtype}; give both as one of {names}")
        return cls(values, scales, others, other_scales)

    @property
    def fp8(self) -> bool:
        """Whether the operands are codes with scales."""
        return self.a_scales is not None

    @property
    def flat(self) -> Flat:
        """Flat arguments for torch's operators."""
        return self.a, self.a_scales, self.b, self.b_scales

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are not None."""
        return [part for part in self.flat if part is not None]
