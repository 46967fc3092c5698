"""One measured kernel: its call, its bytes or operations, its accuracy bound and its peers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

Work = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """Kernel call on inputs that are already on the device."""

    name: str
    shape: str
    work: Work
    amount: float | Callable[[], float]
    """Bytes to move, with each input read once and each output written once; or floating-point operations. A function
    if the amount depends on a result.
    """
    unit: str
    """"TB/s" or "TFLOP/s"."""
    error: Callable[[], float]
    """Relative error of a sample of the result, compared with float32 arithmetic; NaN never passes."""
    bound: float
    """Largest accepted error."""
    metric: str | None = None
    """Name of the metric that reports the rate for goals."""
    best: bool = False
    """Whether the largest rate counts if several cases share a metric; else the smallest counts."""
    peers: Mapping[str, Callable[[], Work]] = field(default_factory=dict)
    """Constructors of equivalent implementations on the same inputs, for comparison."""


@dataclass(frozen=True)
class Measured:
    """Result of one case."""

    row: Mapping[str, Any] | None
    """A row of the table; all rows have the same keys."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: bool = False
    """See `Case.best`."""
    notes: Sequence[str] = ()

    def counts(self, value: float, before: float) -> float:
        """Combine a rate with the metric's value from earlier cases."""
        return max(value, before) if self.best else min(value, before)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Measured:
        """Parse the text of `to_json`."""
        return cls(**json.loads(line))

    @classmethod
    def failed(cls, kernel: str, shape: str, failure: Exception) -> Measured:
        """Row of a case that raised, marked as wrong."""
        reason = (str(failure).splitlines() or [type(failure).__name__])[0][:300]
        row = {
            "kernel": kernel,
            "shape": shape,
            "ms": math.nan,
            "rate": "",
            "of ceiling": "",
            "error": math.nan,
            "right": False,
            "beside": "",
        }
        return cls(row, notes=(f"{kernel}, {shape}: {reason}",))


@dataclass(frozen=True)
class Sizes:
    """Sizes of all inputs."""

    matrix: tuple[int, int]
    """Rows and columns of the quantizers' input."""
    dense: tuple[int, int, int]
    """M, N, K of the ungrouped product."""
    grouped: Mapping[str, tuple[int, int, int, int]]
    """Name -> M, N, K and groups."""
    tokens: int
    hidden: int
    experts: int
    picks: int
    width: int
    """Width of an expert's gate and up projections."""
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
    tokens=16384,
    hidden=2048,
    experts=128,
    picks=8,
    width=768,
    vocabulary=151936,
    head_tokens=8192,
    head_hidden=4096,
)
"""DeepSeek-V3's and Qwen3-30B-A3B's experts, a large loss head."""

TINY = Sizes(
    matrix=(128, 256),
    dense=(128, 128, 256),
    grouped={"deepseek": (256, 128, 256, 2), "qwen": (256, 128, 128, 4), "qwen down": (256, 128, 128, 4)},
    tokens=32,
    hidden=128,
    experts=4,
    picks=2,
    width=128,
    vocabulary=300,
    head_tokens=8,
    head_hidden=64,
)
"""Small enough to test every case in seconds under Triton's interpreter."""


def normal(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Fresh standard normal values."""
    return torch.randn(shape, device=device, dtype=dtype)


def size_of(*tensors: Tensor) -> int:
    """Total bytes of the tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """||found - wanted|| / ||wanted||."""
    found, wanted = found.detach().float(), wanted.detach().float()
    return float((found - wanted).norm() / wanted.norm())
