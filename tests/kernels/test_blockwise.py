"""Properties of FP8 block quantization."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triplane_kernels.blockwise import (
    BLOCK,
    E4M3_MAX,
    dequantize_blockwise,
    fake_quantize_blockwise,
    quantize_blockwise,
)

SIZES = st.integers(1, 300)
SETTINGS = settings(max_examples=40, deadline=None)


def matrix(rows: int, columns: int, seed: int, spread: float = 1.0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=draw) * spread


@SETTINGS
@given(SIZES, SIZES, st.integers(0, 1000), st.sampled_from([1e-20, 1e-4, 1.0, 1e6]))
def test_shapes_scales_and_error_bound(rows: int, columns: int, seed: int, spread: float) -> None:
    weight = matrix(rows, columns, seed, spread)
    codes, scales = quantize_blockwise(weight)
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == weight.shape
    assert scales.shape == (-(-rows // BLOCK), -(-columns // BLOCK)) and bool((scales > 0).all())
    per_element = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
    # Half a unit in the last place: 2^-4 relative for normal codes, 2^-10 of a scale for subnormal ones.
    bound = torch.maximum(weight.abs() * 2**-4, per_element * 2**-10) * 1.001
    assert bool(((dequantize_blockwise(codes, scales) - weight).abs() <= bound).all())


@SETTINGS
@given(SIZES, SIZES, st.integers(0, 1000), st.floats(1e-6, 1e6))
def test_quantizing_what_was_quantized_is_lossless(rows: int, columns: int, seed: int, spread: float) -> None:
    once = fake_quantize_blockwise(matrix(rows, columns, seed, spread))
    codes, _ = quantize_blockwise(once)
    first, _ = quantize_blockwise(matrix(rows, columns, seed, spread))
    assert torch.equal(codes.float(), first.float())
    torch.testing.assert_close(fake_quantize_blockwise(once), once, rtol=2e-7, atol=0)


@SETTINGS
@given(st.integers(0, 1000), st.integers(-20, 20))
def test_a_power_of_two_passes_through(seed: int, exponent: int) -> None:
    weight = matrix(130, 140, seed)
    codes, scales = quantize_blockwise(weight)
    scaled_codes, scaled_scales = quantize_blockwise(weight * 2.0**exponent)
    assert torch.equal(codes.float(), scaled_codes.float())
    assert torch.equal(scales * 2.0**exponent, scaled_scales)


def test_blocks_do_not_see_each_other() -> None:
    weight = matrix(256, 256, 0)
    codes, scales = quantize_blockwise(weight)
    weight[:128, :128] *= 1000
    other_codes, other_scales = quantize_blockwise(weight)
    assert torch.equal(codes[128:].float(), other_codes[128:].float())
    assert torch.equal(scales.flatten()[1:], other_scales.flatten()[1:])


def test_the_largest_value_of_a_block_takes_the_largest_code() -> None:
    codes, scales = quantize_blockwise(matrix(128, 128, 1))
    assert float(codes.float().abs().max()) == E4M3_MAX
    assert scales.shape == (1, 1)


def test_a_zero_block_stays_zero_and_finite() -> None:
    codes, scales = quantize_blockwise(torch.zeros(128, 256))
    assert torch.equal(scales, torch.ones(1, 2)) and not codes.float().any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_stays_visible(bad: float) -> None:
    weight = matrix(128, 128, 0)
    weight[3, 4] = bad
    assert not bool(torch.isfinite(dequantize_blockwise(*quantize_blockwise(weight))).all())


def test_the_gradient_passes_straight_through() -> None:
    weight = matrix(100, 130, 2).requires_grad_()
    outer = matrix(100, 130, 3)
    (fake_quantize_blockwise(weight) * outer).sum().backward()
    assert torch.equal(weight.grad, outer)
