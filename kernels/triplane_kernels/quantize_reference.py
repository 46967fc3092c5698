"""FP8 block quantization in torch: activations in 1x128 blocks, weights in 128x128 blocks, MXFP8 in 1x32 blocks. Any
device; float64 computes in float64.

Sources: DeepSeek-V3, section 3.3 (arXiv:2412.19437); OCP Microscaling Formats 1.0 with scales rounded up
(arXiv:2506.08027, section 3.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from triplane_kernels.blockwise import BLOCK, block_scales, by_e4m3_max, quantize_blockwise
from triplane_kernels.rounding import power_of_two as power
from triplane_kernels.rounding import to_e4m3, uniforms

MX_BLOCK = 32
E8M0_NAN = 255
E8M0_ONE = 127


def quantize_activations(x: Tensor, power_of_two: bool, seed: int | None) -> tuple[Tensor, Tensor]:
    """Codes [M, K] and scales [M, ceil(K/128)] of x [M, K]: code = round(x / scale).

    Scales are stored column by column.
    """
    blocks = _row_blocks(_computed(x), BLOCK)
    scales = block_scales(blocks.abs().amax(dim=2), power_of_two=power_of_two)
    scaled = (blocks / scales[:, :, None]).flatten(1)[:, : x.shape[1]]
    return to_e4m3(scaled, _random(x, seed)).contiguous(), scales.t().contiguous().t()


def quantize_both(x: Tensor, power_of_two: bool, seed: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_activations` of x [M, K] and of its transpose; stochastic rounding uses the same random number for an
    element in both.
    """
    codes, scales = quantize_activations(x, power_of_two, seed)
    blocks = _row_blocks(_computed(x).t(), BLOCK)
    scales_t = block_scales(blocks.abs().amax(dim=2), power_of_two=power_of_two)
    scaled = (blocks / scales_t[:, :, None]).flatten(1)[:, : x.shape[0]]
    random = _random(x, seed)
    codes_t = to_e4m3(scaled, None if random is None else random.t())
    return codes, scales, codes_t.contiguous(), scales_t.t().contiguous().t()


def quantize_weights(w: Tensor, power_of_two: bool, transposed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_blockwise` of each matrix of w [G, N, K], and the same codes and scales transposed (empty unless
    `transposed`).
    """
    count, rows, columns = w.shape
    padded = torch.nn.functional.pad(_computed(w), (0, 0, 0, -rows % BLOCK))
    codes, scales = quantize_blockwise(padded.flatten(0, 1), power_of_two=power_of_two)
    codes = codes.view(padded.shape)[:, :rows].contiguous()
    scales = scales.view(count, padded.shape[1] // BLOCK, -(-columns // BLOCK))
    kept = slice(None) if transposed else slice(0)
    return codes, scales, transpose(codes[kept]), transpose(scales[kept])


def transpose(matrices: Tensor) -> Tensor:
    """Contiguous [G, K, N] of [G, N, K]. A new tensor, as results of operators must be, also where nothing moves."""
    return matrices.mT.clone(memory_format=torch.contiguous_format)


def quantize_mx(x: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    """Codes [M, K] and E8M0 scales uint8 [M, ceil(K/32)] of x [M, K]: scale = 2^(byte - 127)."""
    blocks = _row_blocks(_computed(x), MX_BLOCK)
    scales = e8m0_scales(blocks.abs().amax(dim=2).float())
    inverse = power(127 - scales.int(), blocks.dtype)
    inverse = torch.where(scales == E8M0_NAN, torch.nan, inverse)
    scaled = (blocks * inverse[:, :, None]).flatten(1)[:, : x.shape[1]]
    return to_e4m3(scaled, _random(x, seed)).contiguous(), scales


def e8m0_scales(amax: Tensor) -> Tensor:
    """uint8 exponents, biased by 127, of amax / 448 rounded up to a power of two (RCEIL), so that no value is clamped.

    amax: float32. An all-zero block has scale 1; a block with NaN or infinity has the E8M0 NaN, 255.
    """
    bits = by_e4m3_max(amax).view(torch.int32)
    exponent = torch.where(bits <= 0x00400000, 0, (bits + 0x7FFFFF) >> 23)
    exponent = torch.where(amax == 0, E8M0_ONE, exponent)
    return torch.where(amax < torch.inf, exponent, E8M0_NAN).to(torch.uint8)


def dequantize_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, K] in `dtype` from codes [M, K] and scales [M, ceil(K/128)]."""
    blocks = _row_blocks(codes.to(dtype), BLOCK) * scales.to(dtype)[:, :, None]
    return blocks.flatten(1)[:, : codes.shape[1]]


def dequantize_weights(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., N, K] in `dtype` from codes [..., N, K] and scales [..., ceil(N/128), ceil(K/128)]."""
    spread = scales.to(dtype).repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return codes.to(dtype) * spread[..., : codes.shape[-2], : codes.shape[-1]]


def dequantize_mx(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, K] in `dtype` from codes [M, K] and E8M0 scales uint8 [M, ceil(K/32)]."""
    factor = power(scales.int() - 127, dtype)
    factor = torch.where(scales == E8M0_NAN, torch.nan, factor)
    return (_row_blocks(codes.to(dtype), MX_BLOCK) * factor[:, :, None]).flatten(1)[:, : codes.shape[1]]


def _computed(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _row_blocks(x: Tensor, width: int) -> Tensor:
    """[M, ceil(K/width), width], padded with zeros."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % width))
    return padded.reshape(x.shape[0], padded.shape[1] // width, width)


def _random(x: Tensor, seed: int | None) -> Tensor | None:
    return None if seed is None else uniforms(x.shape[0], x.shape[1], seed, x.device)
