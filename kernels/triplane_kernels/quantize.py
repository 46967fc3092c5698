"""FP8 quantizers: activations by 1x128 blocks, weights by 128x128 blocks, MXFP8 by 1x32 blocks.

    x bf16|f32 --quantize_*--> codes float8_e4m3fn, scales; x' = codes * scales

Every quantizer keeps NaN and infinity visible: a block with one becomes NaN. Finite values are never clamped.
Quantizers have no gradient. Sources: DeepSeek-V3, section 3.3 (arXiv:2412.19437); OCP Microscaling Formats 1.0; RCEIL
scales, arXiv:2506.08027.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from triplane_kernels import quantize_reference
from triplane_kernels.custom_ops import on_the_tensors_device, operator
from triplane_kernels.errors import KernelInputError
from triplane_kernels.machine import choose
from triplane_kernels.tuning import workload

BLOCK = 128
MX_BLOCK = 32
E4M3 = torch.float8_e4m3fn
SHAPES = [(rows, columns) for rows in (1024, 8192, 65536) for columns in (2048, 4096, 8192)]


def quantize_activations(
    x: Tensor, *, power_of_two: bool = False, stochastic_seed: int | None = None
) -> tuple[Tensor, Tensor]:
    """Quantize rows in blocks of 128 columns: scale = amax / 448, code = round_to_e4m3(x / scale).

    x: [M, K] bfloat16, float32 or float64, any M and K (edge blocks are narrower), any strides. Returns codes [M, K]
    float8_e4m3fn and scales [M, ceil(K/128)] float32, stored column by column (stride 1 along M) for the GEMMs. An
    all-zero block has scale 1.

    power_of_two: scales rounded up to powers of two. stochastic_seed: 0 to 2^63 - 1; rounds up with the probability for
    which the expected code * scale equals the value, by Philox at the element's position, so every step needs its own
    seed. Raises KernelInputError.
    """
    _check("quantize_activations", x, 2, stochastic_seed)
    return _quantize_activations(x.detach(), power_of_two, stochastic_seed)


def quantize_both(
    x: Tensor, *, power_of_two: bool = False, stochastic_seed: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_activations` of x [M, K] and of its transpose, both from x itself, in one pass.

    Returns codes [M, K], scales [M, ceil(K/128)], codes_t [K, M], scales_t [K, ceil(M/128)]: the operand of forward and
    dgrad, and the operand of wgrad, which sums over M. Options and errors as of `quantize_activations`.
    """
    _check("quantize_both", x, 2, stochastic_seed)
    return _quantize_both(x.detach(), power_of_two, stochastic_seed)


def quantize_weights(w: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Quantize each matrix in blocks of 128x128: `blockwise.quantize_blockwise`, the trainer's recipe, bit for bit.

    w: [..., N, K] bfloat16, float32 or float64, any sizes and strides. Returns codes [..., N, K] float8_e4m3fn and
    scales [..., ceil(N/128), ceil(K/128)] float32. Raises KernelInputError.
    """
    return _weights(w, power_of_two, transposed=False)[:2]


def quantize_weights_both(w: Tensor, *, power_of_two: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantize_weights`, and the same codes and scales transposed: codes_t [..., K, N], scales_t [..., ceil(K/128),
    ceil(N/128)].

    Square blocks give both orientations the same numbers; dgrad multiplies by the second.
    """
    return _weights(w, power_of_two, transposed=True)


def transpose_codes(codes: Tensor) -> Tensor:
    """Contiguous [..., K, N] of codes [..., N, K], any dtype of one byte. Raises KernelInputError."""
    if codes.dim() < 2 or codes.element_size() != 1:
        raise KernelInputError(
            f"transpose_codes: codes {list(codes.shape)} of {codes.dtype}; give [..., N, K] of one byte"
        )
    flat = codes.detach().contiguous().view(codes.shape[:-2].numel(), *codes.shape[-2:])
    turned: Tensor = _transpose(flat)
    return turned.view(*codes.shape[:-2], codes.shape[-1], codes.shape[-2])


def quantize_mx(x: Tensor, *, stochastic_seed: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantize rows to MXFP8: blocks of 32 columns with an E8M0 scale, rounded up (RCEIL).

    x: [M, K] bfloat16, float32 or float64. Returns codes [M, K] float8_e4m3fn and scales uint8 [M, ceil(K/32)], where
    byte b means 2^(b - 127) and 255 NaN. An all-zero block has byte 127. stochastic_seed and errors as of
    `quantize_activations`.
    """
    _check("quantize_mx", x, 2, stochastic_seed)
    return _quantize_mx(x.detach(), stochastic_seed)


def dequantize_activations(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[M, K] in `dtype` from codes [M, K] and scales [M, ceil(K/128)]."""
    return quantize_reference.dequantize_rows(codes, scales, dtype)


def dequantize_weights(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[..., N, K] in `dtype` from codes [..., N, K] and scales [..., ceil(N/128), ceil(K/128)]."""
    return quantize_reference.dequantize_weights(codes, scales, dtype)


def dequantize_weights_into(out: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write `dequantize_weights` into contiguous out, bfloat16 or float32 [G, N, K]: one pass, without temporary
    tensors, where the kernel runs. Raises KernelInputError.
    """
    wanted = (*codes.shape[:-2], _blocks(codes.shape[-2]), _blocks(codes.shape[-1]))
    if codes.dim() != 3 or out.shape != codes.shape or scales.shape != wanted or not out.is_contiguous():
        raise KernelInputError(
            f"dequantize_weights_into: codes {list(codes.shape)}, scales {list(scales.shape)} and contiguous out "
            f"{list(out.shape)} must be [G, N, K], [G, ceil(N/128), ceil(K/128)] and [G, N, K]"
        )
    if choose("dequantize_weights_into", out, codes, scales) == "reference":
        out.copy_(dequantize_weights(codes, scales, torch.promote_types(out.dtype, torch.float32)))
        return
    from triplane_kernels import quantize_triton

    on_the_tensors_device(quantize_triton.dequantize_weights)(codes.contiguous(), scales.contiguous(), out)
    # torch does not see a kernel's writes; what is derived from `out` is kept by its version
    torch.autograd.graph.increment_version(out)


def dequantize_mx(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[M, K] in `dtype` from codes [M, K] and E8M0 scales uint8 [M, ceil(K/32)]."""
    return quantize_reference.dequantize_mx(codes, scales, dtype)


def _weights(w: Tensor, power_of_two: bool, transposed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check("quantize_weights", w, None, None)
    leading = w.shape[:-2]
    count = leading.numel()
    results = _quantize_weights(w.detach().reshape(count, *w.shape[-2:]), power_of_two, transposed)
    first, second, third, fourth = (
        found.view(*leading, *found.shape[-2:]) if len(found) == count else found for found in results
    )
    return first, second, third, fourth


def _check(op: str, x: Tensor, dimensions: int | None, seed: int | None) -> None:
    if x.dim() != dimensions and (dimensions is not None or x.dim() < 2):
        wanted = f"{dimensions}" if dimensions else "at least 2"
        raise KernelInputError(f"{op}: x has {x.dim()} dimensions; reshape it to {wanted}")
    if x.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise KernelInputError(f"{op}: x is {x.dtype}; convert it to bfloat16, float32 or float64")
    if seed is not None and not 0 <= seed < 2**63:
        raise KernelInputError(f"{op}: stochastic_seed is {seed}; take one from 0 to 2^63 - 1")


def _blocks(size: int, width: int = BLOCK) -> int:
    return -(-size // width)


def _codes(x: Tensor, *shape: int) -> Tensor:
    return x.new_empty(shape, dtype=E4M3)


def _row_scales(x: Tensor, rows: int, columns: int) -> Tensor:
    return x.new_empty((_blocks(columns), rows), dtype=torch.float32).t()


def _implementation(op: str, x: Tensor) -> ModuleType:
    if choose(op, x) == "reference":
        return quantize_reference
    from triplane_kernels import quantize_triton

    return quantize_triton


def _fake_activations(x: Tensor, power_of_two: bool, seed: int | None) -> tuple[Tensor, Tensor]:
    return _codes(x, *x.shape), _row_scales(x, *x.shape)


def _fake_both(x: Tensor, power_of_two: bool, seed: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, columns = x.shape
    return (
        _codes(x, rows, columns),
        _row_scales(x, rows, columns),
        _codes(x, columns, rows),
        _row_scales(x, columns, rows),
    )


def _fake_weights(w: Tensor, power_of_two: bool, transposed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, rows, columns = w.shape
    held = count if transposed else 0
    scales = w.new_empty((count, _blocks(rows), _blocks(columns)), dtype=torch.float32)
    scales_t = w.new_empty((held, _blocks(columns), _blocks(rows)), dtype=torch.float32)
    return _codes(w, *w.shape), scales, _codes(w, held, columns, rows), scales_t


def _fake_mx(x: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    return _codes(x, *x.shape), x.new_empty((x.shape[0], _blocks(x.shape[1], MX_BLOCK)), dtype=torch.uint8)


@operator("quantize_activations", fake=_fake_activations)
def _quantize_activations(x: Tensor, power_of_two: bool, seed: int | None) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _implementation("quantize_activations", x).quantize_activations(
        x, power_of_two, seed
    )
    return found


@operator("quantize_both", fake=_fake_both)
def _quantize_both(x: Tensor, power_of_two: bool, seed: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor, Tensor] = _implementation("quantize_both", x).quantize_both(
        x, power_of_two, seed
    )
    return found


@operator("quantize_weights", fake=_fake_weights)
def _quantize_weights(w: Tensor, power_of_two: bool, transposed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor, Tensor] = _implementation("quantize_weights", w).quantize_weights(
        w, power_of_two, transposed
    )
    return found


@operator("transpose_codes", fake=lambda codes: codes.new_empty(codes.mT.shape))
def _transpose(codes: Tensor) -> Tensor:
    found: Tensor = _implementation("transpose_codes", codes).transpose(codes)
    return found


@operator("quantize_mx", fake=_fake_mx)
def _quantize_mx(x: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _implementation("quantize_mx", x).quantize_mx(x, seed)
    return found


@workload("quantize_activations", SHAPES)
def _tune_activations(rows: int, columns: int) -> None:
    quantize_activations(_drawn(rows, columns))


@workload("quantize_both", SHAPES)
def _tune_both(rows: int, columns: int) -> None:
    quantize_both(_drawn(rows, columns))


@workload("quantize_weights", [(8, 4096, 7168), (128, 1536, 2048), (1, 4096, 4096)])
def _tune_weights(count: int, rows: int, columns: int) -> None:
    codes, scales, *_ = quantize_weights_both(_drawn(count, rows, columns))
    dequantize_weights_into(torch.empty_like(codes, dtype=torch.float32), codes, scales)


@workload("quantize_mx", SHAPES)
def _tune_mx(rows: int, columns: int) -> None:
    quantize_mx(_drawn(rows, columns))


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
