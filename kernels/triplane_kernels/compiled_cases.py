"""Cases of `compiled`: each public operator once per kind of operand, on empty CPU tensors of sizes that affect the
compiler.

The compiler specializes on sizes that are 1 or no multiple of 16, and on rows that the copy engine can't copy: the
cases "odd" and "ones".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

import torch
from torch import Tensor

from triplane_kernels.gemm import gemm
from triplane_kernels.grouped_gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad
from triplane_kernels.loss_head import loss_head
from triplane_kernels.norm import rms_norm
from triplane_kernels.permute import permute, unpermute
from triplane_kernels.quantize import (
    dequantize_weights_into,
    quantize_activations,
    quantize_both,
    quantize_mx,
    quantize_weights_both,
)
from triplane_kernels.router import route
from triplane_kernels.swiglu import swiglu, swiglu_backward, swiglu_backward_quantized, swiglu_quantized

P = ParamSpec("P")
CASES: dict[str, Callable[..., object]] = {}
FIRST_ALONE = frozenset({"odd sizes", "ones"})
"""Cases that only test whether kernels compile: their first configurations suffice, since these take minutes."""
E4M3, FLOAT = torch.float8_e4m3fn, torch.float32


def case(name: str) -> Callable[[Callable[P, object]], Callable[P, object]]:
    """Register the decorated function as the case of that name. The function has no parameters."""

    def register(run: Callable[P, object]) -> Callable[P, object]:
        CASES[name] = run
        return run

    return register


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _rows(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Codes and scales in the layout of `quantize_activations`."""
    return _empty(rows, columns, dtype=E4M3), _empty(-(-columns // 128), rows, dtype=FLOAT).t()


def _matrices(*shape: int) -> tuple[Tensor, Tensor]:
    """Codes and scales in the layout of `quantize_weights`."""
    return _empty(*shape, dtype=E4M3), _empty(*shape[:-2], *(-(-size // 128) for size in shape[-2:]), dtype=FLOAT)


def _offsets(groups: int) -> Tensor:
    return torch.zeros(groups + 1, dtype=torch.int32)


@case("quantize")
def _quantize() -> None:
    x = _empty(256, 1024)
    quantize_activations(x)
    quantize_both(x)
    quantize_mx(x)
    codes, scales, *_ = quantize_weights_both(x[None])
    dequantize_weights_into(_empty(1, 256, 1024, dtype=FLOAT), codes, scales)


@case("quantize, stochastic")
def _quantize_stochastic() -> None:
    x = _empty(256, 1024)
    quantize_activations(x, power_of_two=True, stochastic_seed=3)
    quantize_both(x, stochastic_seed=2**40)
    quantize_mx(x, stochastic_seed=3)


@case("grouped forward, FP8")
def _grouped_fp8() -> None:
    grouped_gemm(_rows(4096, 1024), _matrices(8, 512, 1024), _offsets(8))


@case("grouped wgrad, FP8")
def _wgrad_fp8() -> None:
    grouped_gemm_wgrad(_rows(512, 4096), _rows(1024, 4096), _offsets(8))


@case("grouped forward, bfloat16")
def _grouped_plain() -> None:
    grouped_gemm(_empty(4096, 1024), _empty(8, 512, 1024), _offsets(8))


@case("grouped dgrad, bfloat16")
def _dgrad_plain() -> None:
    grouped_gemm_dgrad(_empty(4096, 512), _empty(8, 512, 1024), _offsets(8))


@case("grouped wgrad, bfloat16")
def _wgrad_plain() -> None:
    grouped_gemm_wgrad(_empty(4096, 512), _empty(4096, 1024), _offsets(8))


@case("grouped, float32")
def _grouped_float32() -> None:
    a, b, grad = _empty(4096, 1024, dtype=FLOAT), _empty(8, 512, 1024, dtype=FLOAT), _empty(4096, 512, dtype=FLOAT)
    grouped_gemm(a, b, _offsets(8))
    grouped_gemm_dgrad(grad, b, _offsets(8))
    grouped_gemm_wgrad(grad, a, _offsets(8))


@case("product, FP8")
def _gemm() -> None:
    gemm(_rows(512, 1024), _matrices(256, 1024))


@case("product, FP8, rows scaled")
def _gemm_rows() -> None:
    gemm(_rows(512, 1024), _rows(256, 1024))


@case("permute")
def _permute() -> None:
    permuted = permute(_empty(4096, 2048).requires_grad_(), torch.zeros(4096, 8, dtype=torch.int32), 128)
    unpermute(permuted.rows, permuted, _empty(4096, 8, dtype=FLOAT).requires_grad_()).sum().backward()  # type: ignore[no-untyped-call]


@case("permute, 1024 experts")
def _plan() -> None:
    permute(_empty(4096, 2048), torch.zeros(4096, 8, dtype=torch.int32), 1024)


@case("route")
def _route() -> None:
    logits = _empty(4096, 128, dtype=FLOAT).requires_grad_()
    route(logits, 8)[0].sum().backward()  # type: ignore[no-untyped-call]


@case("route, sigmoid and bias")
def _route_sigmoid() -> None:
    logits = _empty(4096, 256, dtype=FLOAT).requires_grad_()
    route(logits, 8, bias=logits[0], scores="sigmoid", normalize=False)[0].sum().backward()  # type: ignore[no-untyped-call]


@case("swiglu")
def _swiglu(rows: int = 4096, width: int = 768) -> None:
    gate_up, gradient = _empty(rows, 2 * width), _empty(rows, width)
    swiglu(gate_up)
    swiglu_backward(gradient, gate_up)
    swiglu_quantized(gate_up)
    swiglu_backward_quantized(gradient, gate_up)


@case("norm and rotation")
def _norm(rows: int = 4096, columns: int = 128, heads: int = 4) -> None:
    angles = _empty(rows, 1, columns, dtype=FLOAT)
    leaves = _empty(rows, heads, columns).requires_grad_(), _empty(columns, dtype=FLOAT).requires_grad_()
    rotary = None if columns % 2 else (angles, angles)
    rms_norm(*leaves, 1e-6, rotary).sum().backward()  # type: ignore[no-untyped-call]


@case("norm of hidden states")
def _norm_of_hidden() -> None:
    leaves = _empty(4096, 2048).requires_grad_(), _empty(2048, dtype=FLOAT).requires_grad_()
    rms_norm(*leaves, 1e-6).sum().backward()  # type: ignore[no-untyped-call]


@case("loss head")
def _loss_head(allowed: Tensor | None = None, tokens: int = 1024, vocabulary: int = 2048, width: int = 512) -> None:
    leaves = _empty(tokens, width).requires_grad_(), _empty(vocabulary, width).requires_grad_()
    loss_head(*leaves, torch.zeros(tokens, dtype=torch.int64), allowed=allowed)[0].sum().backward()  # type: ignore[no-untyped-call]


@case("loss head, mask [V]")
def _loss_head_one_mask() -> None:
    _loss_head(torch.ones(2048, dtype=torch.bool))


@case("loss head, mask [T, V]")
def _loss_head_masked() -> None:
    _loss_head(torch.ones(1024, 2048, dtype=torch.bool))


@case("loss head, float32")
def _loss_head_float32() -> None:
    leaves = _empty(1024, 512, dtype=FLOAT).requires_grad_(), _empty(2048, 512, dtype=FLOAT).requires_grad_()
    loss_head(*leaves, torch.zeros(1024, dtype=torch.int64))[0].sum().backward()  # type: ignore[no-untyped-call]


@case("odd sizes")
def _odd() -> None:
    """No size is a multiple of 16: the copy engine is not used, and few accesses are wide."""
    _small(rows=333, columns=201, depth=77, groups=3, experts=5)


@case("ones")
def _ones() -> None:
    """Sizes of 1 become constants of the compiled code."""
    _small(rows=1, columns=1, depth=1, groups=1, experts=1)


def _small(rows: int, columns: int, depth: int, groups: int, experts: int) -> None:
    offsets, x = _offsets(groups), _empty(rows, depth)
    quantize_activations(x, stochastic_seed=1)
    quantize_both(x)
    quantize_mx(x)
    quantize_weights_both(x[None])
    grouped_gemm(_rows(rows, depth), _matrices(groups, columns, depth), offsets)
    grouped_gemm_wgrad(_rows(columns, rows), _rows(depth, rows), offsets)
    grouped_gemm(x, _empty(groups, columns, depth), offsets)
    grouped_gemm_dgrad(_empty(rows, columns), _empty(groups, columns, depth), offsets)
    grouped_gemm_wgrad(_empty(rows, columns), x, offsets)
    # the largest depth for the copy engine
    grouped_gemm(_rows(rows, 16), _matrices(groups, columns, 16), offsets)
    gemm(_rows(rows, depth), _rows(columns, depth))
    permuted = permute(x.requires_grad_(), torch.zeros(rows, 1, dtype=torch.int32), experts, block=1)
    unpermute(permuted.rows, permuted, _empty(rows, 1, dtype=FLOAT).requires_grad_()).sum().backward()  # type: ignore[no-untyped-call]
    route(_empty(rows, experts).requires_grad_(), 1)[0].sum().backward()  # type: ignore[no-untyped-call]
    _swiglu(rows, columns)
    _norm(rows, columns, heads=1)
    _loss_head(torch.ones(rows, columns, dtype=torch.bool), rows, columns, depth)
