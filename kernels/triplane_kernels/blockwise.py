"""FP8 block quantization of weights, the torch reference: one float32 scale per 128x128 block.

Recipe: scale = amax / 448, code = round_to_e4m3(weight / scale), weight' = code * scale. Source: DeepSeek-V3, section 3.3 (arXiv:2412.19437).
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
E4M3_MAX = 448.0


def quantize_blockwise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a float32 matrix.

    weight: [N, K] float32, any N and K (edge blocks are smaller). Returns codes [N, K] float8_e4m3fn and scales
    [ceil(N/128), ceil(K/128)] float32, both on weight's device. An all-zero block has scale 1. NaN and infinity give NaN codes
    or an infinite scale, so they stay visible.
    """
    blocks = _blocks(weight)
    amax = blocks.abs().amax(dim=(1, 3))
    scales = torch.where(amax == 0, torch.ones_like(amax), amax / E4M3_MAX)
    scaled = blocks / scales[:, None, :, None]
    codes = _unblocks(scaled.clamp(-E4M3_MAX, E4M3_MAX), weight.shape)
    return codes.to(torch.float8_e4m3fn), scales


def dequantize_blockwise(codes: Tensor, scales: Tensor) -> Tensor:
    """The float32 weights [N, K] that codes [N, K] and scales [ceil(N/128), ceil(K/128)] stand for."""
    return _unblocks(_blocks(codes.float()) * scales[:, None, :, None], codes.shape)


def fake_quantize_blockwise(weight: Tensor) -> Tensor:
    """`dequantize(quantize(weight))` with the straight-through gradient: d out / d weight is the identity."""
    return _StraightThrough.apply(weight)  # type: ignore[no-any-return, no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, weight: Tensor) -> Tensor:
        return dequantize_blockwise(*quantize_blockwise(weight.detach()))

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _blocks(matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    pad = (0, -columns % BLOCK, 0, -rows % BLOCK)
    padded = torch.nn.functional.pad(matrix, pad) if any(pad) else matrix
    return padded.reshape(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)


def _unblocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    whole = blocks.reshape(blocks.shape[0] * BLOCK, blocks.shape[2] * BLOCK)
    return whole[: shape[0], : shape[1]]
