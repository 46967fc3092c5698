"""What the launches of the matrix products share: configurations, and how operands reach a kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from triplane_kernels.machine import machine
from triplane_kernels.tuning import Config


def tile_config(
    rows: int, columns: int, depth: int, warps: int, stages: int, programs: int = 1, band: int = 8
) -> Config:
    """band: row tiles walked together, so that their columns' operand stays in L2; programs: of them a
    multiprocessor.
    """
    return {
        "BLOCK_M": rows,
        "BLOCK_N": columns,
        "BLOCK_K": depth,
        "BAND": band,
        "PROGRAMS": programs,
        "num_warps": warps,
        "num_stages": stages,
    }


PLAIN_CONFIGS = [
    tile_config(128, 256, 64, 8, 4),
    tile_config(128, 256, 64, 8, 3),
    tile_config(128, 128, 64, 8, 5),
    tile_config(128, 128, 64, 4, 3, programs=2),
    tile_config(64, 128, 64, 4, 4, programs=2),
    tile_config(64, 64, 32, 4, 3, programs=2),
]
FLOAT32_CONFIGS = [tile_config(64, 64, 32, 4, 3, programs=2)]
"""Float32 is multiplied outside the matrix units, exactly: for comparisons, not for speed. Larger tiles take minutes to
compile, and do not fit.
"""
FP8_POINTER_CONFIGS = [
    tile_config(64, 64, 128, 8, 3, programs=2),
    tile_config(64, 64, 128, 4, 3, programs=2),
    tile_config(128, 64, 128, 8, 3),
]
PLAIN_POINTER_CONFIGS = [
    tile_config(64, 64, 64, 4, 3, programs=2),
    tile_config(64, 128, 64, 8, 3, programs=2),
    tile_config(128, 128, 64, 8, 3),
]
SMALL_FP8 = tile_config(64, 128, 128, 4, 1, programs=3, band=2)
SMALL_PLAIN = tile_config(64, 64, 64, 4, 1, programs=3, band=2)


def named_configs(op: str, values: Tensor, tma: bool, fast: list[Config]) -> tuple[str, list[Config]]:
    """The name under which an op keeps what it finds for such operands, and its candidates: `fast` where the copy
    engine brings tiles of codes.

    What goes by pointers has a name of its own: tiles that are large enough for the copy engine spill hundreds of
    registers there.
    """
    name = f"{op}_{kind(values)}"
    if values.dtype == torch.float32:
        return name, FLOAT32_CONFIGS
    codes = values.dtype == torch.float8_e4m3fn
    if not tma:
        return f"{name}_pointers", FP8_POINTER_CONFIGS if codes else PLAIN_POINTER_CONFIGS
    return name, fast if codes else PLAIN_CONFIGS


def kind(values: Tensor) -> str:
    """The operands' dtype in the name under which configurations are kept."""
    return "fp8" if values.dtype == torch.float8_e4m3fn else str(values.dtype).removeprefix("torch.")


def programs(config: Config) -> int:
    """How many persistent programs a configuration starts; taken out of it, since no kernel reads it."""
    return machine().multiprocessors * config.pop("PROGRAMS")


def by_tma(*matrices: Tensor) -> bool:
    """Whether descriptors can name these contiguous tensors: 16-byte aligned bases and rows, not empty, on a machine
    that has them.
    """
    here = machine()
    fits = all(
        matrix.numel() and matrix.data_ptr() % 16 == 0 and matrix.shape[-1] * matrix.element_size() % 16 == 0
        for matrix in matrices
    )
    return (here.tma or here.interpreter) and fits


def operand(matrix: Tensor, block: list[int], tma: bool) -> Any:
    """A matrix as a kernel takes it: a descriptor of its tiles for the copy engine, or the tensor for pointers."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block) if tma else matrix
