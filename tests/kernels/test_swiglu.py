"""SwiGLU alone and fused with quantization, against float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_inputs import EXACT, FINITE, NOT_FINITE, SQNR_FORWARD, Way, normal, relative_error, sqnr
from torch import Tensor
from triplane_kernels import quantize_reference
from triplane_kernels.errors import KernelInputError
from triplane_kernels.quantize import dequantize_activations, quantize_activations
from triplane_kernels.swiglu import swiglu, swiglu_backward, swiglu_backward_quantized, swiglu_quantized

# NumPy computes what the interpreter runs, and says where it overflows.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
SETTINGS = settings(max_examples=7, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = [torch.float32, torch.bfloat16]


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values`, float64, rounded to `dtype`; gradients pass straight through."""
    return values + (values.to(dtype).double() - values).detach()


def defined(gate_up: Tensor, dtype: torch.dtype) -> Tensor:
    """By definition, in float64, of inputs of `dtype`."""
    gate, up = gate_up.double().chunk(2, dim=1)
    return rounded(rounded(torch.nn.functional.silu(gate), dtype) * up, dtype)


def slopes(gradient: Tensor, gate_up: Tensor) -> Tensor:
    """Autograd's gradient of the definition, in float64."""
    exact = gate_up.detach().double().requires_grad_()
    (defined(exact, gate_up.dtype) * gradient.double()).sum().backward()
    return exact.grad


@SETTINGS
@given(rows=st.integers(0, 140), width=st.integers(0, 150), seed=st.integers(0, 99), dtype=st.sampled_from(DTYPES))
def test_any_shape(way: Way, rows: int, width: int, seed: int, dtype: torch.dtype) -> None:
    gate_up = normal(rows, 2 * width, seed=seed, spread=3).to(way.device, dtype)
    gradient = normal(rows, width, seed=seed + 1).to(way.device, dtype)
    bound = EXACT if dtype == torch.float32 else 4e-3
    found, found_slopes = swiglu(gate_up), swiglu_backward(gradient, gate_up)
    assert found.dtype == found_slopes.dtype == dtype and found.shape == (rows, width)
    assert relative_error(found, defined(gate_up, gate_up.dtype)) < bound
    assert relative_error(found_slopes, slopes(gradient, gate_up)) < bound
    of_gate_up, codes, scales = swiglu_backward_quantized(gradient, gate_up)
    assert torch.equal(of_gate_up, found_slopes)
    assert codes.shape == gate_up.shape and scales.shape == (rows, -(-2 * width // 128))
    _same_codes((codes, scales), slopes(gradient, gate_up))
    _same_codes(swiglu_quantized(gate_up), defined(gate_up, gate_up.dtype))


def _same_codes(found: tuple[Tensor, Tensor], exact: Tensor, *, power_of_two: bool = False) -> None:
    """`found` is the quantization of `exact`, but for values that float32 moved over the edge between two numbers of
    bfloat16, or between two codes.
    """
    codes, scales = (
        part.to(exact.device) for part in quantize_reference.quantize_activations(exact, power_of_two, None)
    )
    near = ((found[1] / scales - 1).abs() <= 1e-5) | (found[1] == scales) | (found[1].isnan() & scales.isnan())
    # so may the largest value of a block be moved, over a power of two, too: then its scale doubles or halves
    far = (found[1] / scales - 1).abs() > 2**-7
    assert bool((near | (power_of_two & ((found[1] == 2 * scales) | (found[1] == scales / 2))) | ~far).all())
    assert int((~near).sum()) <= 2 + 2e-4 * near.numel()
    kept = near.repeat_interleave(128, 1)[:, : codes.shape[1]]
    moved = (_ordered(found[0]) - _ordered(codes)).abs() * kept
    assert not bool((moved > 1).any())
    assert int(moved.sum()) <= 2 + 1e-4 * moved.numel()


def _ordered(codes: Tensor) -> Tensor:
    """Codes as integers that count up with their values; both zeros are 0."""
    bits = codes.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FINITE)
def test_every_kind_of_input(way: Way, name: str, dtype: torch.dtype) -> None:
    rows, width = way.pick((70, 150), (3000, 2056))
    gate_up = FINITE[name](rows, 2 * width, 3).to(way.device, dtype)
    # below a gate of -88 float32's sigmoid is 0
    smallest, rtol = 1e-33, 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(swiglu(gate_up), defined(gate_up, gate_up.dtype).to(dtype), rtol=rtol, atol=smallest)
    if name == "huge":
        return  # the products of backward pass float32's largest number
    gradient = FINITE[name](rows, width, 4).to(way.device, dtype)
    wanted = slopes(gradient, gate_up)
    found = swiglu_backward(gradient, gate_up)
    assert (
        relative_error(found, wanted) < (EXACT if dtype == torch.float32 else 4e-3)
        or float(wanted.abs().max()) < smallest
    )


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("width", [256, 200])
def test_quantized_results_are_those_of_the_definition(way: Way, width: int, power_of_two: bool) -> None:
    rows = way.pick(100, 20000)
    gate_up = normal(rows, 2 * width, seed=1, spread=2).bfloat16().to(way.device)
    gradient = normal(rows, width, seed=2).bfloat16().to(way.device)
    found = swiglu_quantized(gate_up, power_of_two=power_of_two)
    _same_codes(found, defined(gate_up, gate_up.dtype), power_of_two=power_of_two)
    assert sqnr(dequantize_activations(*found), defined(gate_up, gate_up.dtype)) > SQNR_FORWARD
    _, *found_slopes = swiglu_backward_quantized(gradient, gate_up, power_of_two=power_of_two)
    _same_codes((found_slopes[0], found_slopes[1]), slopes(gradient, gate_up), power_of_two=power_of_two)
    assert sqnr(dequantize_activations(*found_slopes), slopes(gradient, gate_up)) > SQNR_FORWARD
    for scales in (found[1], found_slopes[1]):
        assert scales.stride(0) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_result_is_rounded_as_engines_do_before_it_is_quantized(way: Way, dtype: torch.dtype) -> None:
    """vLLM's and the trainer's recipes: silu(gate), its product with up, then codes."""
    gate_up = normal(64, 512, seed=1, spread=2).to(way.device, dtype)
    gate, up = gate_up.chunk(2, dim=1)
    wanted = torch.nn.functional.silu(gate.double()).to(dtype) * up
    assert float((swiglu(gate_up) != wanted).double().mean()) < (2e-3 if dtype == torch.bfloat16 else 1)
    for found, whole in zip(swiglu_quantized(gate_up), quantize_activations(swiglu(gate_up)), strict=True):
        assert torch.equal(found.float(), whole.float())


@pytest.mark.parametrize("name", NOT_FINITE)
def test_what_is_not_finite_stays_visible_in_its_row(way: Way, name: str) -> None:
    gate_up = NOT_FINITE[name](100, 300, 3).to(way.device)
    at = int((~torch.isfinite(gate_up)).any(1).nonzero())
    gradient = normal(100, 150).to(way.device)
    _, codes, scales = swiglu_backward_quantized(gradient, gate_up)
    for found in (
        swiglu(gate_up),
        swiglu_backward(gradient, gate_up),
        dequantize_activations(*swiglu_quantized(gate_up)),
        dequantize_activations(codes, scales),
    ):
        assert (~torch.isfinite(found)).any(1).nonzero().flatten().tolist() == [at]


def test_gradcheck() -> None:
    assert torch.autograd.gradcheck(swiglu, (normal(5, 8, spread=2).double().requires_grad_(),))


def test_autograd_takes_the_kernels_backward(way: Way) -> None:
    gate_up = normal(20, 60).to(way.device).requires_grad_()
    outer = normal(20, 30, seed=1).to(way.device)
    (swiglu(gate_up) * outer).sum().backward()
    assert torch.equal(gate_up.grad, swiglu_backward(outer, gate_up.detach()))


def test_torch_finds_no_fault_in_the_operators(way: Way) -> None:
    operators = torch.ops.triplane
    gate_up, gradient = normal(9, 40).to(way.device), normal(9, 20).to(way.device)
    torch.library.opcheck(operators.swiglu.default, (gate_up.clone().requires_grad_(),))
    torch.library.opcheck(operators.swiglu_backward.default, (gradient, gate_up))
    torch.library.opcheck(operators.swiglu_quantized.default, (gate_up, False))
    torch.library.opcheck(operators.swiglu_backward_quantized.default, (gradient, gate_up, True))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(KernelInputError, match=r"gate_up must be \[P, 2F\]"):
        swiglu(normal(3, 5))
    with pytest.raises(KernelInputError, match=r"the gradient must be \[3, 4\]"):
        swiglu_backward(normal(3, 5), normal(3, 8))
