"""FP8 block quantization of weights, the torch reference: one float32 scale per 128x128 block.

Recipe: scale = amax / 448, code = round_to_e4m3(weight / scale), weight' = code * scale. Source: DeepSeek-V3, section
3.3 (arXiv:2412.19437).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
E4M3_MAX = 448.0
SMALLEST_AMAX = 1e-10
"""Smallest largest magnitude of a block of activations in vLLM (`per_token_group_quant_fp8`)."""
SMALLEST_SCALE = 2.0**-126
"""Smallest normal float32. A denormal scale has too few bits for a division, or is zero."""


def block_scales(amax: Tensor, *, power_of_two: bool = False) -> Tensor:
    """Scales for blocks whose largest magnitude is `amax` (float32, any shape): amax / 448, and 1 for an all-zero
    block.

    Never below 2^-126. power_of_two: rounded up to the next power of two, so that scaling is exact. NaN and infinity
    stay.
    """
    scales = by_e4m3_max(amax).float()
    scales = torch.where(scales < SMALLEST_SCALE, SMALLEST_SCALE, scales)
    if power_of_two:
        scales = torch.where(scales < torch.inf, _power_of_two_up(scales), scales)
    return torch.where(amax == 0, 1.0, scales)


def by_e4m3_max(amax: Tensor) -> Tensor:
    """amax / 448, rounded to nearest on every device. Division by a Python number would multiply by the rounded
    reciprocal on CUDA.
    """
    return amax / amax.new_full((), E4M3_MAX)


def quantize_blockwise(weight: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize a matrix.

    weight: [N, K] float32, any N and K (edge blocks are smaller). Returns codes [N, K] float8_e4m3fn and scales
    [ceil(N/128), ceil(K/128)] float32, both on weight's device. An all-zero block has scale 1. NaN and infinity give
    NaN codes or an infinite scale, so they stay visible. power_of_two: scales rounded up to powers of two.
    """
    blocks = _blocks(weight)
    scales = block_scales(blocks.abs().amax(dim=(1, 3)), power_of_two=power_of_two)
    scaled = blocks / scales[:, None, :, None]
    codes = _unblocks(scaled.clamp(-E4M3_MAX, E4M3_MAX), weight.shape)
    return codes.to(torch.float8_e4m3fn), scales


def dequantize_blockwise(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 weights [N, K] from codes [N, K] and scales [ceil(N/128), ceil(K/128)]."""
    return _unblocks(_blocks(codes.float()) * scales[:, None, :, None], codes.shape)


def fake_quantize_blockwise(weight: Tensor) -> Tensor:
    """`dequantize(quantize(weight))` with the straight-through gradient: d out / d weight is the identity."""
    return _StraightThrough.apply(weight)  # type: ignore[no-any-return, no-untyped-call]


def fake_quantize_rows(rows: Tensor, *, power_of_two: bool = False) -> Tensor:
    """Round activations as vLLM does on Hopper, with the straight-through gradient.

    rows: float32 [..., columns]. Each block of 128 columns of a row is divided by scale = max(amax, 1e-10) / 448,
    rounded to nearest e4m3 and multiplied by the scale. Returns float32 of the same shape; a block with NaN or infinity
    becomes NaN. power_of_two: scales rounded up to powers of two, and 1 for a block of zeros. Source: vLLM,
    `per_token_group_quant_fp8` with float32 scales.
    """
    return _StraightThroughRows.apply(rows, power_of_two)  # type: ignore[no-any-return, no-untyped-call]


class _StraightThroughRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, rows: Tensor, power_of_two: bool) -> Tensor:
        columns = rows.shape[-1]
        padded = torch.nn.functional.pad(rows, (0, -columns % BLOCK))
        blocks = padded.reshape(*rows.shape[:-1], -1, BLOCK)
        amax = blocks.abs().amax(-1, keepdim=True)
        scales = block_scales(amax, power_of_two=True) if power_of_two else by_e4m3_max(amax.clamp(min=SMALLEST_AMAX))
        codes = (blocks / scales).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return (codes.float() * scales).reshape(padded.shape)[..., :columns]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, weight: Tensor) -> Tensor:
        return dequantize_blockwise(*quantize_blockwise(weight.detach()))

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _power_of_two_up(values: Tensor) -> Tensor:
    """The smallest power of two not below each positive normal float32."""
    return ((values.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def _blocks(matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    pad = (0, -columns % BLOCK, 0, -rows % BLOCK)
    padded = torch.nn.functional.pad(matrix, pad) if any(pad) else matrix
    return padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)


def _unblocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    whole = blocks.reshape(blocks.shape[0] * BLOCK, blocks.shape[2] * BLOCK)
    return whole[: shape[0], : shape[1]]
