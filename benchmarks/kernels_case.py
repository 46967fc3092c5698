"""One measured kernel: what it does, how much it moves or computes, what it is judged by and what runs beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Work = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A call of a kernel on inputs that are already on the device."""

    name: str
    shape: str
    work: Work
    amount: float
    """Bytes that must move, each input read once and each output written once; or floating-point operations."""
    unit: str
    """"TB/s" or "TFLOP/s"."""
    error: Callable[[], float]
    """Relative error of the result against float32 arithmetic, on a sample of it; NaN never passes."""
    bound: float
    """The largest error that is right."""
    metric: str | None = None
    """Under this name the rate is reported for goals."""
    counts: Callable[[float, float], float] = min
    """Which rate counts where several cases share a metric: min, or max where one of them is enough."""
    peers: Mapping[str, Work] = field(default_factory=dict)
    """Others doing the same, on the same inputs."""


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    matrix: tuple[int, int]
    """Rows and columns that the quantizers take."""
    dense: tuple[int, int, int]
    """M, N, K of the product without groups."""
    grouped: Mapping[str, tuple[int, int, int, int]]
    """Name -> M, N, K and groups."""
    tokens: int
    hidden: int
    experts: int
    picks: int
    width: int
    """Of an expert: gate and up each."""
    vocabulary: int
    head_tokens: int
    head_hidden: int


REAL = Sizes(
    matrix=(32768, 7168),
    dense=(8192, 4096, 7168),
    grouped={
        "deepseek": (32768, 2048, 7168, 8),
        "qwen": (65536, 1536, 2048, 128),
        "qwen down": (65536, 2048, 768, 128),
    },
    tokens=16384, hidden=2048, experts=128, picks=8, width=768,
    vocabulary=151936, head_tokens=8192, head_hidden=4096,
)  # fmt: skip
"""DeepSeek-V3's and Qwen3-30B-A3B's experts, a large loss head."""

TINY = Sizes(
    matrix=(128, 256),
    dense=(128, 128, 256),
    grouped={"deepseek": (256, 128, 256, 2), "qwen": (256, 128, 128, 4), "qwen down": (256, 128, 128, 4)},
    tokens=32, hidden=128, experts=4, picks=2, width=128,
    vocabulary=300, head_tokens=8, head_hidden=64,
)  # fmt: skip
"""Shows in seconds, under Triton's interpreter, that every case runs and is right."""


def normal(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Fresh standard normal values."""
    return torch.randn(shape, device=device, dtype=dtype)


def size_of(*tensors: Tensor) -> int:
    """Bytes of all of them."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted|| / ||wanted||."""
    found, wanted = found.detach().float(), wanted.detach().float()
    return float((found - wanted).norm() / wanted.norm())
