"""FP8 quantizers: the kernels give the reference's codes bit for bit, and the reference is as near as E4M3 allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_inputs import FINITE, NOT_FINITE, normal, relative_error
from torch import Tensor
from triplane_kernels import quantize_reference
from triplane_kernels.blockwise import BLOCK, fake_quantize_rows, quantize_blockwise
from triplane_kernels.errors import KernelInputError
from triplane_kernels.quantize import (
    dequantize_activations,
    dequantize_mx,
    dequantize_weights,
    dequantize_weights_into,
    quantize_activations,
    quantize_both,
    quantize_mx,
    quantize_weights,
    quantize_weights_both,
    transpose_codes,
)

if TYPE_CHECKING:
    from conftest import Way

NAN, INFINITY = float("nan"), float("inf")
SETTINGS = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SIZES = st.integers(0, 150)


def same(found: Tensor, wanted: Tensor) -> bool:
    """Equal shape, dtype and every number, a NaN being like a NaN."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    return torch.equal(found.float().nan_to_num(nan=-7.0).cpu(), wanted.float().nan_to_num(nan=-7.0).cpu())


def all_same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    return all(same(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", [*FINITE, *NOT_FINITE])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_every_kernel_gives_the_references_very_bits(way: Way, name: str, power_of_two: bool) -> None:
    if way.name == "reference":
        pytest.skip("is the other side")
    rows, columns = way.pick((70, 150), (3000, 7176))
    x = {**FINITE, **NOT_FINITE}[name](rows, columns, 3).to(way.device)
    for dtype in (torch.float32, torch.bfloat16):
        value, seed = x.to(dtype), 2**40 + 5 if power_of_two else None
        wanted = quantize_reference.quantize_both(value, power_of_two, seed)
        assert all_same(quantize_activations(value, power_of_two=power_of_two, stochastic_seed=seed), wanted[:2])
        assert all_same(quantize_both(value, power_of_two=power_of_two, stochastic_seed=seed), wanted)
        assert all_same(quantize_mx(value, stochastic_seed=seed), quantize_reference.quantize_mx(value, seed))
        wanted = quantize_reference.quantize_weights(value[None], power_of_two, True)
        assert all_same(quantize_weights_both(value[None], power_of_two=power_of_two), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_divided_by_their_scales_as_the_recipes_do(way: Way, dtype: torch.dtype) -> None:
    """bfloat16 values lie on the middle of two codes, where a product with the reciprocal rounds otherwise."""
    x = normal(512, 256).to(way.device, dtype)
    codes, scales, codes_t, scales_t = quantize_both(x)
    for value, found, scale in ((x, codes, scales), (x.t(), codes_t, scales_t)):
        spread = scale.repeat_interleave(BLOCK, 1)
        assert same(found, (value.float() / spread).to(torch.float8_e4m3fn))
    assert same(codes, quantize_activations(x)[0])
    assert same(dequantize_activations(codes, scales), fake_quantize_rows(x.float()))


@SETTINGS
@given(rows=SIZES, columns=SIZES, seed=st.integers(0, 99), stochastic=st.booleans())
def test_any_shape_and_stride(way: Way, rows: int, columns: int, seed: int, stochastic: bool) -> None:
    x = normal(columns, rows, seed=seed).to(way.device).t()
    given_seed = seed if stochastic else None
    codes, scales, codes_t, scales_t = quantize_both(x, stochastic_seed=given_seed)
    assert all_same((codes, scales), quantize_activations(x, stochastic_seed=given_seed))
    assert codes.shape == x.shape and scales.shape == (rows, -(-columns // BLOCK))
    assert scales.stride(0) == 1 or scales.numel() <= 1 or rows <= 1 or scales.shape[1] <= 1
    wanted = quantize_reference.quantize_both(x, False, given_seed)
    assert all_same((codes, scales, codes_t, scales_t), wanted)
    mx_codes, mx_scales = quantize_mx(x, stochastic_seed=given_seed)
    assert mx_codes.shape == x.shape and mx_scales.shape == (rows, -(-columns // 32))
    assert all_same((mx_codes, mx_scales), quantize_reference.quantize_mx(x, given_seed))


@pytest.mark.parametrize("shape", [(200, 130), (3, 130, 70), (2, 2, 64, 128), (0, 5, 5), (2, 0, 5)])
def test_weights_are_quantized_as_the_trainer_does(way: Way, shape: tuple[int, ...]) -> None:
    w = normal(*shape, seed=1).to(way.device)
    codes, scales, codes_t, scales_t = quantize_weights_both(w)
    assert codes.shape == w.shape and scales.shape == (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))
    assert same(codes_t.mT, codes) and same(scales_t.mT, scales) and codes_t.is_contiguous()
    assert all_same(quantize_weights(w), (codes, scales))
    matrices, found, found_scales = (part[None].flatten(0, -3) for part in (w, codes, scales))
    for index, matrix in enumerate(matrices):
        assert all_same((found[index], found_scales[index]), quantize_blockwise(matrix))


@SETTINGS
@given(count=st.integers(0, 3), rows=SIZES, columns=SIZES)
def test_codes_are_transposed(way: Way, count: int, rows: int, columns: int) -> None:
    codes = torch.arange(count * rows * columns, device=way.device).to(torch.uint8).view(count, rows, columns)
    turned = transpose_codes(codes)
    assert torch.equal(turned, codes.mT) and turned.is_contiguous()
    with pytest.raises(KernelInputError, match=r"one byte"):
        transpose_codes(codes.float())


@pytest.mark.parametrize("shape", [(2, 128, 256), (3, 131, 77), (1, 1, 1), (0, 128, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_of_codes_are_written_into_a_tensor(way: Way, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.arange(256, dtype=torch.uint8).repeat(-(-torch.Size(shape).numel() // 256))
    codes = values[: torch.Size(shape).numel()].view(shape).view(torch.float8_e4m3fn).to(way.device)
    scales = normal(shape[0], -(-shape[1] // 128), -(-shape[2] // 128), seed=4).abs().to(way.device)
    out = torch.full(shape, 7.0, dtype=dtype, device=way.device)
    dequantize_weights_into(out, codes, scales)
    assert out._version > 0, "whoever keeps what it derives from out by its version would never renew it"
    assert same(out, quantize_reference.dequantize_weights(codes, scales, torch.float32).to(dtype))
    with pytest.raises(KernelInputError, match=r"contiguous out \[1, "):
        dequantize_weights_into(out.new_empty(1, *shape), codes, scales)


@pytest.mark.parametrize("name", FINITE)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_the_reference_is_as_near_as_the_format_allows(name: str, power_of_two: bool) -> None:
    x = FINITE[name](130, 200, 5).double()
    codes, scales, codes_t, scales_t = quantize_both(x, power_of_two=power_of_two)
    for value, found, scale in ((x, codes, scales), (x.t(), codes_t, scales_t)):
        spread = scale.double().repeat_interleave(BLOCK, 1)[:, : value.shape[1]]
        error = (dequantize_activations(found, scale, torch.float64) - value).abs()
        # half a step: 2^-4 of a normal code, 2^-10 of the scale for a subnormal one
        assert bool((error <= torch.maximum(value.abs() * 2**-4, spread * 2**-10) * (1 + 1e-6)).all())
    mx_codes, mx_scales = quantize_mx(x)
    factor = torch.exp2(mx_scales.double() - 127)
    error = (dequantize_mx(mx_codes, mx_scales, torch.float64) - x).abs()
    bound = torch.maximum(x.abs() * 2**-4, factor.repeat_interleave(32, 1)[:, :200] * 2**-10)
    assert bool((error <= bound * (1 + 1e-6)).all())


def test_gaussian_data_keeps_its_published_accuracy(way: Way) -> None:
    x = normal(256, 512).to(way.device)
    assert relative_error(dequantize_activations(*quantize_activations(x)), x) < 0.0275
    assert relative_error(dequantize_mx(*quantize_mx(x)), x) < 0.0275
    w = quantize_weights(x)
    assert relative_error(dequantize_weights(*w), x) < 0.0275


@pytest.mark.parametrize("name", NOT_FINITE)
def test_what_is_not_finite_stays_visible_in_its_block_and_nowhere_else(way: Way, name: str) -> None:
    x = NOT_FINITE[name](140, 300, 0).to(way.device)
    bad = ~torch.isfinite(x)
    row, column = (int(part) for part in bad.nonzero()[0])
    codes, scales, codes_t, scales_t = quantize_both(x)
    for found, at, block in (
        (dequantize_activations(codes, scales), (row, column), (slice(row, row + 1), column // 128, 128)),
        (dequantize_activations(codes_t, scales_t).t(), (row, column), (row // 128, slice(column, column + 1), 128)),
        (dequantize_mx(*quantize_mx(x)), (row, column), (slice(row, row + 1), column // 32, 32)),
        (dequantize_weights(*quantize_weights(x)), (row, column), (row // 128, column // 128, 128)),
    ):
        assert not torch.isfinite(found[at])
        rows, columns, width = block
        rows = slice(rows * width, rows * width + width) if isinstance(rows, int) else rows
        columns = slice(columns * width, columns * width + width) if isinstance(columns, int) else columns
        outside = torch.isfinite(found)
        outside[rows, columns] = True
        assert bool(outside.all())


@pytest.mark.parametrize("spread", [1.0, 2.0**-8, 3e-4])
def test_stochastic_rounding_is_unbiased_and_lands_on_a_neighbour(way: Way, spread: float) -> None:
    """spread: small ones put most values among the subnormal codes of a block whose largest is 1."""
    draws = way.pick(512, 4096)
    line = normal(128, seed=4) * spread
    line[0] = 1.0
    x = line.repeat(draws, 1).to(way.device)
    found = dequantize_activations(*quantize_activations(x, stochastic_seed=11)).double().cpu()
    step = torch.maximum(line.abs().double() * 2**-3, torch.tensor(2.0**-9 / 448))
    assert bool(((found - line.double()).abs() < step * (1 + 1e-5)).all())
    # the mean of n draws of a two-point variable has a deviation of at most step / 2 / sqrt(n); 128 columns within 4.5
    # of them
    drift = (found.mean(0) - line.double()).abs()
    assert bool((drift <= 4.5 * step / 2 / draws**0.5 + 1e-12).all())
    rounded = dequantize_activations(*quantize_activations(x)).double().cpu()
    assert float((found.mean(0) - line).norm()) < 0.5 * float((rounded.mean(0) - line).norm())


def test_a_stochastic_draw_depends_on_the_seed_and_the_place_alone(way: Way) -> None:
    x = torch.full((64, 256), 1.03)
    x[:, ::128] = 448.0
    x = x.to(way.device)
    first, _ = quantize_activations(x, stochastic_seed=1)
    again, _ = quantize_activations(x, stochastic_seed=1)
    other, _ = quantize_activations(x, stochastic_seed=2)
    assert same(first, again)
    assert 0.1 < float((first.float() != other.float()).float().mean()) < 0.6
    assert not same(first[:32], first[32:]) and not same(first[:, :128], first[:, 128:])


def test_numbers_are_those_of_philox() -> None:
    """Known answers of Random123 for Philox 4x32-10: all zeros, and counter and key of ones."""
    from triplane_kernels.rounding import philox

    zero = philox(torch.zeros(1, dtype=torch.int64), 0)
    assert [int(word) for word in zero] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_power_of_two_scales_are_powers_of_two_and_never_clamp(way: Way) -> None:
    x = normal(64, 256, seed=8).to(way.device)
    _, scales = quantize_activations(x, power_of_two=True)
    mantissa, _ = torch.frexp(scales.cpu())
    assert bool((mantissa == 0.5).all())
    amax = x.reshape(64, 2, 128).abs().amax(2)
    assert bool((amax <= scales * 448).all()) and bool((amax > scales * 224).all())


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        (0.0, 127),
        (448.0, 127),
        (448.1, 128),
        (224.0, 126),
        (1e-45, 0),
        (2.0**-126, 0),
        (3.4e38, 247),
        (NAN, 255),
        (INFINITY, 255),
    ],
)
def test_mx_scales_round_up(way: Way, amax: float, byte: int) -> None:
    x = torch.zeros(1, 32)
    x[0, 7] = -amax
    _, scales = quantize_mx(x.to(way.device))
    assert int(scales[0, 0]) == byte


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: quantize_activations(torch.zeros(3)), "1 dimensions; reshape it to 2"),
        (lambda: quantize_both(torch.zeros(3, 3, dtype=torch.int32)), "torch.int32; convert it"),
        (lambda: quantize_weights(torch.zeros(3)), "reshape it to at least 2"),
        (lambda: quantize_mx(torch.zeros(2, 2), stochastic_seed=-1), "stochastic_seed is -1"),
    ],
)
def test_a_wrong_input_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(KernelInputError, match=message):
        call()


def test_operators_are_whole(way: Way) -> None:
    x = normal(40, 136).to(way.device)
    ops, checks = torch.ops.triplane, ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(ops.quantize_activations.default, (x, False, 3), test_utils=checks)
    torch.library.opcheck(ops.quantize_both.default, (x, True, None), test_utils=checks)
    torch.library.opcheck(ops.quantize_weights.default, (x[None], False, True), test_utils=checks)
    torch.library.opcheck(ops.quantize_mx.default, (x, None), test_utils=checks)
