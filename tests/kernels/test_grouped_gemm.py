"""Products of an expert layer against float64: FP8 and plain, forward, dgrad and wgrad, any group sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_inputs import (
    DIFFERENCE,
    EXACT,
    FINITE,
    GROUPS,
    SQNR_FORWARD,
    SQNR_GRADIENT,
    difference,
    normal,
    offsets_of,
    relative_error,
    sqnr,
)
from torch import Tensor
from triplane_kernels.errors import KernelInputError
from triplane_kernels.gemm import cublas_takes, gemm
from triplane_kernels.grouped_gemm import grouped_gemm, grouped_gemm_dgrad, grouped_gemm_wgrad
from triplane_kernels.machine import machine
from triplane_kernels.operands import Operands
from triplane_kernels.quantize import (
    dequantize_activations,
    dequantize_weights,
    quantize_activations,
    quantize_both,
    quantize_weights,
    quantize_weights_both,
)

if TYPE_CHECKING:
    from conftest import Way

SETTINGS = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FLOAT = torch.float32
NAN = float("nan")


def by_groups(rows: tuple[int, ...]) -> list[slice]:
    bounds = offsets_of(rows).tolist()
    return [slice(start, end) for start, end in itertools.pairwise(bounds)]


def exact_rows(a: Tensor, b: Tensor, rows: tuple[int, ...]) -> Tensor:
    """float64 out[m] = b[g] @ a[m], zero for rows of no group."""
    out = a.new_zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    for matrix, part in zip(b.double(), by_groups(rows), strict=True):
        out[part] = a[part].double() @ matrix.t()
    return out


def exact_wgrad(grad: Tensor, a: Tensor, rows: tuple[int, ...]) -> Tensor:
    return torch.stack([grad[part].double().t() @ a[part].double() for part in by_groups(rows)])


def near(way: Way, found: Tensor, wanted: Tensor) -> bool:
    """A GPU's tensor cores keep about 14 bits of an FP8 sum of 128; elsewhere sums are float32."""
    assert found.shape == wanted.shape
    assert bool(torch.isfinite(found).all())
    return difference(found, wanted) <= EXACT if way.name == "gpu" else relative_error(found, wanted) <= EXACT


_LIKE_OTHERS = {"even", "one_takes_all"}


def sizes(way: Way, rows: tuple[int, ...]) -> tuple[int, ...]:
    return way.pick(tuple(size // 2 for size in rows), tuple(size * 16 for size in rows))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in _LIKE_OTHERS else name for name in GROUPS]
)
def test_fp8_products_equal_float64_on_the_same_codes(way: Way, name: str) -> None:
    rows, (columns, depth) = sizes(way, GROUPS[name]), way.pick((136, 144), (2048, 1040))
    total, count = sum(rows) + 5, len(rows)
    a, grad, w = normal(total, depth, seed=1), normal(total, columns, seed=2), normal(count, columns, depth, seed=3)
    a, grad, w, offsets = (part.to(way.device) for part in (a, grad, w, offsets_of(rows)))
    quantized, (codes, scales, codes_t, scales_t) = quantize_activations(a), quantize_weights_both(w)
    values = dequantize_weights(codes, scales, torch.float64)
    found = grouped_gemm(quantized, (codes, scales), offsets, out_dtype=FLOAT)
    assert near(way, found, exact_rows(dequantize_activations(*quantized), values, rows))
    quantized = quantize_activations(grad)
    wanted = exact_rows(dequantize_activations(*quantized), values.mT, rows)
    assert near(way, grouped_gemm_dgrad(quantized, (codes, scales), offsets, out_dtype=FLOAT), wanted)
    found = grouped_gemm_dgrad(quantized, (codes_t, scales_t), offsets, transposed=True, out_dtype=FLOAT)
    assert near(way, found, wanted)
    left, right = quantize_both(grad)[2:], quantize_both(a)[2:]
    wanted = exact_wgrad(dequantize_activations(*left).t(), dequantize_activations(*right).t(), rows)
    assert near(way, grouped_gemm_wgrad(left, right, offsets), wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GROUPS)
def test_gluon_equals_float64_on_the_same_codes(gpu: torch.device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not machine().gluon:
        pytest.skip("needs a Hopper GPU and Triton 3.6 or newer")
    monkeypatch.setenv("TRIPLANE_KERNELS", "gluon")
    rows = tuple(size * 16 for size in GROUPS[name])
    for columns, depth in ((2048, 1040), (1536, 2048), (200, 16)):
        a, w = normal(sum(rows) + 5, depth, seed=1).to(gpu), normal(len(rows), columns, depth, seed=3).to(gpu)
        quantized, weights, offsets = quantize_activations(a), quantize_weights(w), offsets_of(rows, gpu)
        wanted = exact_rows(dequantize_activations(*quantized), dequantize_weights(*weights), rows)
        found = grouped_gemm(quantized, weights, offsets, out_dtype=FLOAT)
        assert difference(found, wanted) <= EXACT and bool(torch.isfinite(found).all())
        assert torch.equal(found, grouped_gemm(quantized, weights, offsets, out_dtype=FLOAT))


@pytest.mark.parametrize(("name", "dtype"), [("ragged", torch.bfloat16), ("empty_ones", FLOAT), ("all_empty", FLOAT)])
def test_plain_products_equal_float64(way: Way, name: str, dtype: torch.dtype) -> None:
    rows, (columns, depth) = sizes(way, GROUPS[name]), way.pick((136, 80), (2048, 1040))
    total, count = sum(rows) + 5, len(rows)
    a, grad, w = normal(total, depth, seed=1), normal(total, columns, seed=2), normal(count, columns, depth, seed=3)
    a, grad, w = (part.to(way.device, dtype) for part in (a, grad, w))
    offsets = offsets_of(rows, way.device)
    assert near(way, grouped_gemm(a, w, offsets, out_dtype=FLOAT), exact_rows(a, w, rows))
    assert near(way, grouped_gemm_dgrad(grad, w, offsets, out_dtype=FLOAT), exact_rows(grad, w.mT, rows))
    assert near(way, grouped_gemm_wgrad(grad, a, offsets), exact_wgrad(grad, a, rows))


@SETTINGS
@given(
    rows=st.lists(st.integers(0, 70), min_size=1, max_size=4).map(tuple),
    columns=st.integers(1, 140),
    depth=st.integers(0, 140),
    seed=st.integers(0, 99),
)
def test_any_shape(way: Way, rows: tuple[int, ...], columns: int, depth: int, seed: int) -> None:
    a, w = normal(sum(rows), depth, seed=seed), normal(len(rows), columns, depth, seed=seed + 1)
    a, w, offsets = (part.to(way.device) for part in (a, w, offsets_of(rows)))
    quantized, weights = quantize_activations(a), quantize_weights(w)
    wanted = exact_rows(dequantize_activations(*quantized), dequantize_weights(*weights), rows)
    assert near(way, grouped_gemm(quantized, weights, offsets, out_dtype=FLOAT), wanted)
    grad = quantize_both(normal(sum(rows), columns, seed=seed).to(way.device))[2:]
    right = quantize_both(a)[2:]
    wanted = exact_wgrad(dequantize_activations(*grad).t(), dequantize_activations(*right).t(), rows)
    assert near(way, grouped_gemm_wgrad(grad, right, offsets), wanted)


@pytest.mark.parametrize("name", FINITE)
def test_adversarial_inputs(way: Way, name: str) -> None:
    rows, (columns, depth) = way.pick((30, 40), (700, 900)), way.pick((64, 130), (512, 1030))
    # products of huge and of denormal rows are brought back among float32's normal numbers
    spread = {"huge": 1e-30, "denormals": 1e10, "tiny": 1e10}.get(name, 1.0)
    a, w = FINITE[name](sum(rows), depth, 1), normal(len(rows), columns, depth, seed=2) * spread
    a, w, offsets = (part.to(way.device) for part in (a, w, offsets_of(rows)))
    quantized, weights = quantize_activations(a), quantize_weights(w)
    found = grouped_gemm(quantized, weights, offsets, out_dtype=FLOAT)
    wanted = exact_rows(
        dequantize_activations(*quantized, torch.float64), dequantize_weights(*weights, torch.float64), rows
    )
    assert near(way, found, wanted)


def test_a_nan_reaches_its_row_and_no_other(way: Way) -> None:
    rows = way.pick((20, 30), (200, 300))
    a, w = normal(sum(rows), 144), normal(2, 72, 144)
    a[rows[0] + 3, 130] = NAN
    found = grouped_gemm(
        *(quantize(part.to(way.device)) for quantize, part in ((quantize_activations, a), (quantize_weights, w))),
        offsets_of(rows, way.device),
    )
    bad = ~torch.isfinite(found.float()).cpu()
    assert bool(bad[rows[0] + 3].all()) and int(bad.sum()) == 72


def test_a_neighbours_infinity_stays_with_the_neighbour(way: Way) -> None:
    """Tiles at the end of a group read rows, and matrices, of the next."""
    a, w = normal(40, 24), normal(2, 24, 24)
    a[20:] = torch.inf
    w[1] = torch.inf
    a, w, offsets = a.to(way.device), w.to(way.device), offsets_of((20, 20), way.device)
    for found in (grouped_gemm(a, w, offsets), grouped_gemm_dgrad(a, w, offsets)):
        assert bool(torch.isfinite(found[:20]).all()) and not bool(torch.isfinite(found[20:]).any())
    assert bool(torch.isfinite(grouped_gemm_wgrad(a, a, offsets)[0]).all())


def test_a_group_without_rows_is_zero_whatever_its_neighbours_hold(way: Way) -> None:
    """An empty group in the midst of a block of 128 rows, whose scales are NaN."""
    rows = (60, 0, 68)
    grad, a = normal(128, 16), normal(128, 24)
    grad[3], a[70] = NAN, NAN
    left, right = (quantize_both(part.to(way.device))[2:] for part in (grad, a))
    found = grouped_gemm_wgrad(left, right, offsets_of(rows, way.device))
    assert not found[1].any() and not bool(torch.isfinite(found[0]).any())


def test_fp8_keeps_the_accepted_distance_from_unquantized_products(way: Way) -> None:
    rows, (columns, depth) = way.pick((128, 128), (4096, 4096)), way.pick((128, 512), (2048, 7168))
    a, w, grad = normal(sum(rows), depth, seed=1), normal(2, columns, depth, seed=2), normal(sum(rows), columns, seed=3)
    a, w, grad, offsets = (part.to(way.device) for part in (a, w, grad, offsets_of(rows)))
    codes = quantize_weights_both(w)
    found = grouped_gemm(quantize_activations(a), codes[:2], offsets)
    wanted = exact_rows(a, w, rows)
    assert sqnr(found, wanted) >= SQNR_FORWARD and difference(found, wanted) < DIFFERENCE
    found = grouped_gemm_dgrad(quantize_activations(grad), codes[2:], offsets, transposed=True)
    wanted = exact_rows(grad, w.mT, rows)
    assert sqnr(found, wanted) >= SQNR_GRADIENT and difference(found, wanted) < DIFFERENCE
    found = grouped_gemm_wgrad(quantize_both(grad)[2:], quantize_both(a)[2:], offsets)
    wanted = exact_wgrad(grad, a, rows)
    assert sqnr(found, wanted) >= SQNR_GRADIENT and difference(found, wanted) < DIFFERENCE


@pytest.mark.parametrize("shape", [(70, 136, 144), (1, 1, 1), (0, 5, 7), (5, 3, 0)])
def test_the_dense_product_takes_weights_and_rows(way: Way, shape: tuple[int, int, int]) -> None:
    rows, columns, depth = shape
    a, b = normal(rows, depth, seed=1).to(way.device), normal(columns, depth, seed=2).to(way.device)
    left, weights, by_rows = quantize_activations(a), quantize_weights(b), quantize_activations(b)
    values = dequantize_activations(*left, torch.float64)
    wanted = values @ dequantize_weights(*weights, torch.float64).t()
    assert near(way, gemm(left, weights, out_dtype=FLOAT), wanted)
    wanted = values @ dequantize_activations(*by_rows, torch.float64).t()
    assert near(way, gemm(left, by_rows, out_dtype=FLOAT), wanted)
    plain = a.bfloat16(), b.bfloat16()
    assert near(way, gemm(*plain, out_dtype=FLOAT), plain[0].double() @ plain[1].double().t())


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 16, 16), (2, 48, 128), (3, 144, 400), (1001, 512, 640), (1000, 400, 2064)])
@pytest.mark.parametrize("forced", ["", "triton"])
def test_cublas_and_the_kernel_equal_float64_on_the_same_codes(
    gpu: torch.device, shape: tuple[int, int, int], forced: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPLANE_KERNELS", forced)
    rows, columns, depth = shape
    a, b = normal(rows, depth, seed=1).to(gpu), normal(columns, depth, seed=2).to(gpu)
    left = quantize_activations(a)
    for right in (quantize_weights(b), quantize_activations(b)):
        assert cublas_takes(Operands(*left, *right), FLOAT) == (machine().capability == (9, 0))
        values = dequantize_weights if right[1].shape[0] < columns else dequantize_activations
        wanted = dequantize_activations(*left, torch.float64) @ values(*right, torch.float64).t()
        for dtype, most in ((FLOAT, EXACT), (torch.bfloat16, 0.003)):
            found = gemm(left, right, out_dtype=dtype)
            assert found.shape == (rows, columns) and found.dtype == dtype
            assert difference(found, wanted) <= most


def test_gradients_of_plain_products() -> None:
    rows, draw = (3, 0, 4), torch.Generator().manual_seed(0)
    offsets = offsets_of(rows)
    a, b, grad = (
        torch.randn(shape, dtype=torch.float64, generator=draw, requires_grad=True)
        for shape in ((8, 5), (3, 6, 5), (8, 6))
    )
    double = {"out_dtype": torch.float64}
    assert torch.autograd.gradcheck(lambda x, y: grouped_gemm(x, y, offsets, **double), (a, b))
    assert torch.autograd.gradcheck(lambda x, y: grouped_gemm_dgrad(x, y, offsets, **double), (grad, b))
    assert torch.autograd.gradcheck(lambda x, y: grouped_gemm_wgrad(x, y, offsets, **double), (grad, a))
    assert torch.autograd.gradcheck(lambda x, y: gemm(x, y, **double), (a, b[0].detach().requires_grad_()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, b, o: grouped_gemm(quantize_activations(a), b, o), "one operand is quantized"),
        (lambda a, b, o: grouped_gemm(a, b.bfloat16(), o), "torch.float32 and torch.bfloat16"),
        (lambda a, b, o: grouped_gemm(a[:, :3], b, o), "don't fit"),
        (lambda a, b, o: grouped_gemm(a, b, o.long()), "give int32"),
        (lambda a, b, o: grouped_gemm(a, b, o[:2]), "don't fit"),
        (lambda a, b, o: grouped_gemm_wgrad(a, a[:3], o), "same rows M"),
        (lambda a, b, o: grouped_gemm_wgrad(quantize_activations(a), quantize_both(a)[2:], o), "same rows M"),
        (lambda a, b, o: gemm(a, b), "must be"),
    ],
)
def test_a_wrong_input_is_named(call: Callable[..., object], message: str) -> None:
    with pytest.raises(KernelInputError, match=message):
        call(torch.zeros(6, 8), torch.zeros(2, 4, 8), offsets_of((2, 4)))


def test_operators_are_whole(way: Way) -> None:
    ops, checks = torch.ops.triplane, ("test_schema", "test_faketensor", "test_autograd_registration")
    fp8_checks = checks[1:]  # the schema's check multiplies its inputs, which float8 can't on a CPU
    a, w = normal(20, 24).to(way.device), normal(2, 16, 24).to(way.device)
    offsets = offsets_of((7, 13), way.device)
    left, right = quantize_activations(a), quantize_weights(w)
    torch.library.opcheck(ops.grouped_gemm.default, (*left, *right, offsets, False, FLOAT), test_utils=fp8_checks)
    torch.library.opcheck(
        ops.grouped_gemm.default, (a, None, w.mT.contiguous(), None, offsets, True, FLOAT), test_utils=checks
    )
    torch.library.opcheck(ops.grouped_gemm_wgrad.default, (a, None, a, None, offsets, FLOAT), test_utils=checks)
    torch.library.opcheck(ops.gemm.default, (a, None, w[0], None, FLOAT), test_utils=checks)
