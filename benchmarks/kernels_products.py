"""Cases bound by the matrix units: the block-scaled product, and the experts' grouped products (forward, dgrad,
wgrad).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from triplane_kernels.gemm import gemm
from triplane_kernels.grouped_gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad
from triplane_kernels.machine import FORCE, machine
from triplane_kernels.quantize import quantize_activations, quantize_both, quantize_weights, quantize_weights_both

from benchmarks import kernels_peers as peers
from benchmarks.kernels_case import Case, Sizes, Work, normal, relative_error

PRODUCT = 0.06
"""Accepted error; an FP8 product of normal data has 3.7%."""
ROUNDED = 0.01
SAMPLE = 256


def dense(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Cases of the ungrouped product."""
    rows, columns, inner = sizes.dense
    a, b = normal(rows, inner, device=device), normal(columns, inner, device=device)
    left, right = quantize_activations(a), quantize_weights(b)
    yield Case(
        "FP8 product",
        f"{rows}x{columns}x{inner}",
        lambda: gemm(left, right),
        2.0 * rows * columns * inner,
        "TFLOP/s",
        lambda: relative_error(gemm(left, right)[:SAMPLE], a[:SAMPLE].float() @ b.float().t()),
        PRODUCT,
        peers={
            "Triton kernel": lambda: _forced("triton", lambda: gemm(left, right)),
            "bfloat16 mm": lambda: lambda: a @ b.t(),
        },
    )


def grouped_deepseek(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """DeepSeek-V3's experts."""
    return _Grouped("deepseek", *sizes.grouped["deepseek"], device).cases()


def grouped_qwen(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Qwen3-30B-A3B's experts."""
    return _Grouped("qwen", *sizes.grouped["qwen"], device).cases()


def grouped_qwen_down(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Their down projection."""
    return _Grouped("qwen down", *sizes.grouped["qwen down"], device).cases()


def grouped_gluon(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """The forward products on the Gluon kernel alone; empty if it can't run."""
    for name, shape in sizes.grouped.items() if machine().gluon else ():
        yield _Grouped(name, *shape, device).on_gluon()


class _Grouped:
    """The products of one projection of an expert layer: a [M, K] by b [G, N, K], with groups as uneven as in real
    routing.
    """

    def __init__(self, name: str, rows: int, columns: int, inner: int, groups: int, device: torch.device) -> None:
        self._name = name
        self._shape = f"{name}: {rows}x{columns}x{inner}, {groups} groups"
        self._flops = 2.0 * rows * columns * inner
        self._offsets = _uneven(rows, groups, device)
        self._a, self._b = normal(rows, inner, device=device), normal(groups, columns, inner, device=device)
        self._gradient = normal(rows, columns, device=device)

    def cases(self) -> Iterator[Case]:
        a, b, gradient, offsets = self._a, self._b, self._gradient, self._offsets
        *codes, turned_codes, turned_scales = quantize_weights_both(b)
        weights, turned = (codes[0], codes[1]), (turned_codes, turned_scales)
        left, of_gradient = quantize_activations(a), quantize_activations(gradient)
        beside = {
            "bfloat16 grouped_mm": lambda: peers.grouped_mm(a, b, offsets),
            "bfloat16 loop": lambda: peers.loop(a, b, offsets),
            "row-scaled scaled_grouped_mm": lambda: peers.row_scaled_grouped_mm(a, b, offsets),
        }
        yield self._case("forward", "FP8", lambda: grouped_gemm(left, weights, offsets), self._forward, PRODUCT, beside)
        yield self._case("forward", "bfloat16", lambda: grouped_gemm(a, b, offsets), self._forward, ROUNDED)
        wide = b.mT.contiguous()
        beside = {
            "bfloat16 grouped_mm": lambda: peers.grouped_mm(gradient, wide, offsets),
            "bfloat16 loop": lambda: peers.loop(gradient, wide, offsets),
        }
        yield self._case(
            "dgrad",
            "FP8",
            lambda: grouped_gemm_dgrad(of_gradient, turned, offsets, transposed=True),
            self._dgrad,
            PRODUCT,
            beside,
        )
        yield self._case("dgrad", "bfloat16", lambda: grouped_gemm_dgrad(gradient, b, offsets), self._dgrad, ROUNDED)
        beside = {
            "bfloat16 grouped_mm": lambda: peers.grouped_mm_wgrad(gradient, a, offsets),
            "bfloat16 loop": lambda: peers.loop_wgrad(gradient, a, offsets),
        }
        high, low = quantize_both(gradient)[2:], quantize_both(a)[2:]
        yield self._case("wgrad", "FP8", lambda: grouped_gemm_wgrad(high, low, offsets), self._wgrad, PRODUCT, beside)
        yield self._case("wgrad", "bfloat16", lambda: grouped_gemm_wgrad(gradient, a, offsets), self._wgrad, ROUNDED)

    def on_gluon(self) -> Case:
        """Forward in FP8, with Gluon forced; by default tuning selects the faster kernel."""
        left, weights, offsets = quantize_activations(self._a), quantize_weights(self._b), self._offsets
        return self._case(
            "forward",
            "FP8 on Gluon",
            _forced("gluon", lambda: grouped_gemm(left, weights, offsets)),
            self._forward,
            PRODUCT,
        )

    def _case(
        self,
        product: str,
        operands: str,
        work: Callable[[], Tensor],
        wanted: Callable[[], tuple[Tensor, Callable[[Tensor], Tensor]]],
        bound: float,
        beside: dict[str, Callable[[], Work]] | None = None,
    ) -> Case:
        def error() -> float:
            right, part = wanted()
            return relative_error(part(work()), right)

        metric = f"grouped_{product}_{self._name}_tflops".replace(" ", "_")
        # Only for wgrad is it open which operands are better.
        judged = operands == "FP8" or product == "wgrad"
        return Case(
            f"grouped {product}, {operands}",
            self._shape,
            work,
            self._flops,
            "TFLOP/s",
            error,
            bound,
            metric if judged else None,
            best=True,
            peers=beside or {},
        )

    def _sample(self) -> tuple[int, slice]:
        """A nonempty group, and some of its rows."""
        bounds = self._offsets.tolist()
        group = max(range(len(bounds) - 1), key=lambda index: bounds[index + 1] - bounds[index])
        return group, slice(bounds[group], min(bounds[group] + SAMPLE, bounds[group + 1]))

    def _forward(self) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        group, rows = self._sample()
        return self._a[rows].float() @ self._b[group].float().t(), lambda out: out[rows]

    def _dgrad(self) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        group, rows = self._sample()
        return self._gradient[rows].float() @ self._b[group].float(), lambda out: out[rows]

    def _wgrad(self) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        group, _ = self._sample()
        begin, end = self._offsets[group : group + 2].tolist()
        return self._gradient[begin:end].float().t() @ self._a[begin:end].float(), lambda out: out[group]


def _forced(way: str, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """The same call with that implementation forced."""

    def forced() -> Tensor:
        before = os.environ.get(FORCE, "")
        os.environ[FORCE] = way
        try:
            return work()
        finally:
            os.environ[FORCE] = before

    return forced


def _uneven(rows: int, groups: int, device: torch.device) -> Tensor:
    """int32 offsets of groups as from a router: sizes differ by a third, are multiples of 128, and sum to rows."""
    blocks = rows // 128
    shares = torch.rand(groups, generator=torch.Generator().manual_seed(0)) + 1.0
    bounds = (shares.cumsum(0) / shares.sum() * blocks).round().int() * 128
    return torch.cat([torch.zeros(1, dtype=torch.int32), bounds.int()]).to(device)
