"""Weights of an expert layer for its matrix products: quantized once per optimizer step, into the codes that are
exported.

    masters gate, up [E, F, H], down [E, H, F] --quantize--> codes, scales --join--> gate_up [E, 2F', H], down [E, H,
    F']

For quantized weights F' is F rounded up to whole blocks, with zero padding, so that no block has rows of both gate and
up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from triplane_kernels.blockwise import BLOCK
from triplane_kernels.errors import KernelInputError
from triplane_kernels.quantize import quantize_weights, transpose_codes

Name = Literal["gate", "up", "down"]
Quantized = tuple[Tensor, Tensor]
"""float8_e4m3fn codes [E, N, K] and float32 scales [E, ceil(N/128), ceil(K/128)]."""


@dataclass(frozen=True)
class ExpertWeights:
    """Operands of the forward pass, and the tensors that receive gradients."""

    gate: Tensor
    """[E, F, H], any float dtype: receives the gradient of the gate projection, straight through the quantization."""
    up: Tensor
    """[E, F, H]."""
    down: Tensor
    """[E, H, F]."""
    gate_up_operand: Tensor
    """[E, 2F', H]: codes, or values if weights are not quantized (then F' is F)."""
    gate_up_scales: Tensor | None
    """float32 [E, 2F'/128, ceil(H/128)]; None if weights are not quantized."""
    gate_up_turned: Tensor | None
    """Transposed codes, [E, H, 2F']: FP8 units read both operands along the summed dimension, and dgrad sums over 2F'.
    None if weights are not quantized.
    """
    down_operand: Tensor
    """[E, H, F']: codes or values."""
    down_scales: Tensor | None
    """float32 [E, ceil(H/128), F'/128], or None."""
    down_turned: Tensor | None
    """Transposed codes, [E, F', H], or None."""

    @classmethod
    def quantize(cls, gate: Tensor, up: Tensor, down: Tensor) -> ExpertWeights:
        """Quantize masters: gate, up [E, F, H] and down [E, H, F], in 128x128 blocks.

        Repeat this after every change of the masters.

        Raises KernelInputError for shapes that don't fit.
        """
        masters = {"gate": gate, "up": up, "down": down}
        return cls.from_codes(gate, up, down, {name: quantize_weights(w.detach()) for name, w in masters.items()})

    @classmethod
    def from_codes(cls, gate: Tensor, up: Tensor, down: Tensor, codes: Mapping[str, Quantized]) -> ExpertWeights:
        """Use existing codes and scales of "gate", "up" and "down", from a checkpoint or a trainer.

        gate, up, down: tensors that receive gradients, [E, F, H], [E, F, H] and [E, H, F]; their values are not read.
        """
        _check_shapes(gate, up, down)
        for name, master in (("gate", gate), ("up", up), ("down", down)):
            _check_codes(name, master, *codes[name])
        (gate_codes, gate_scales), (up_codes, up_scales) = codes["gate"], codes["up"]
        down_codes, down_scales = codes["down"]
        pad = -gate.shape[1] % BLOCK
        gate_up = torch.cat([_padded(gate_codes, (0, 0, 0, pad)), _padded(up_codes, (0, 0, 0, pad))], dim=1)
        joined = gate_up.view(torch.float8_e4m3fn)
        narrow = _padded(down_codes, (0, pad)).contiguous().view(torch.float8_e4m3fn)
        return cls(
            gate,
            up,
            down,
            joined,
            torch.cat([gate_scales, up_scales], dim=1),
            transpose_codes(joined),
            narrow,
            down_scales.contiguous(),
            transpose_codes(narrow),
        )

    @classmethod
    def full(cls, gate: Tensor, up: Tensor, down: Tensor, dtype: torch.dtype) -> ExpertWeights:
        """Weights that are only rounded to `dtype`, for an unquantized layer."""
        _check_shapes(gate, up, down)
        gate_up = torch.cat([gate.detach().to(dtype), up.detach().to(dtype)], dim=1)
        return cls(gate, up, down, gate_up, None, None, down.detach().to(dtype).contiguous(), None, None)

    @property
    def quantized(self) -> bool:
        """Whether the operands are FP8 codes."""
        return self.gate_up_scales is not None

    def codes(self) -> dict[Name, Quantized]:
        """Codes [E, N, K] and scales of "gate", "up" and "down" of the products, without padding, for export.

        Raises KernelInputError if weights are not quantized.
        """
        if self.gate_up_scales is None or self.down_scales is None:
            raise KernelInputError(
                "expert weights are not quantized: make them with ExpertWeights.quantize to export codes"
            )
        width, padded = self.gate.shape[1], self.gate_up_operand.shape[1] // 2
        blocks = padded // BLOCK
        return {
            "gate": (self.gate_up_operand[:, :width], self.gate_up_scales[:, :blocks]),
            "up": (self.gate_up_operand[:, padded : padded + width], self.gate_up_scales[:, blocks:]),
            "down": (self.down_operand[:, :, :width], self.down_scales),
        }


def _check_shapes(gate: Tensor, up: Tensor, down: Tensor) -> None:
    fits = gate.dim() == 3 and up.shape == gate.shape and down.shape == (gate.shape[0], gate.shape[2], gate.shape[1])
    if not fits:
        raise KernelInputError(
            "expert weights: gate and up must be [E, F, H] and down [E, H, F], not "
            f"{list(gate.shape)}, {list(up.shape)} and {list(down.shape)}"
        )


def _check_codes(name: str, master: Tensor, codes: Tensor, scales: Tensor) -> None:
    count, rows, columns = master.shape
    wanted = (count, -(-rows // BLOCK), -(-columns // BLOCK))
    if codes.dtype != torch.float8_e4m3fn or codes.shape != master.shape or scales.shape != wanted:
        raise KernelInputError(
            f"expert weights: {name} needs float8_e4m3fn codes {list(master.shape)} with scales {list(wanted)}, "
            f"not {codes.dtype} {list(codes.shape)} with {list(scales.shape)}"
        )


def _padded(codes: Tensor, pad: tuple[int, ...]) -> Tensor:
    """Codes as bytes, padded with zeros."""
    return torch.nn.functional.pad(codes.view(torch.uint8), pad)
