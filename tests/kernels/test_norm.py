"""Norm and rotation, against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_inputs import EXACT, FINITE, NOT_FINITE, Way, normal, relative_error
from torch import Tensor
from triplane_kernels.errors import KernelInputError
from triplane_kernels.norm import Rotary, rms_norm
from triplane_kernels.tuning import Config

# NumPy computes what the interpreter runs, and says where it overflows.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
SETTINGS = settings(max_examples=7, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = [torch.float32, torch.bfloat16]
EPS = 1e-6


def bound(dtype: torch.dtype) -> float:
    return EXACT if dtype == torch.float32 else 6e-3


def angles(tokens: int, columns: int, *, seed: int = 5) -> Rotary:
    """Cosine and sine of random angles, the second half's other than the first's."""
    drawn = normal(tokens, 1, columns, seed=seed)
    return drawn.cos(), drawn.sin()


def defined(x: Tensor, weight: Tensor | None, rotary: Rotary | None, eps: float = EPS) -> Tensor:
    """By definition, in float64; a pair of coordinates is (first half, second half)."""
    x = x.double()
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    if rotary is not None:
        cosine, sine = (part.double() for part in rotary)
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        x = torch.cat(
            [
                first * cosine[..., :half] - second * sine[..., :half],
                second * cosine[..., half:] + first * sine[..., half:],
            ],
            dim=-1,
        )
    return x


def slopes(gradient: Tensor, x: Tensor, weight: Tensor | None, rotary: Rotary | None, eps: float = EPS) -> list[Tensor]:
    """Autograd's gradients of the definition, in float64: of x, and of the weight if there is one."""
    leaves = [leaf.detach().double().requires_grad_() for leaf in (x, weight) if leaf is not None]
    of = leaves[1] if weight is not None else None
    return list(torch.autograd.grad(defined(leaves[0], of, rotary, eps), leaves, gradient.double()))


@SETTINGS
@given(
    tokens=st.integers(0, 20),
    heads=st.integers(1, 5),
    half=st.integers(1, 70),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(DTYPES),
    parts=st.sampled_from(["norm", "rotation", "both"]),
)
def test_any_shape(way: Way, tokens: int, heads: int, half: int, seed: int, dtype: torch.dtype, parts: str) -> None:
    x = normal(tokens, heads, 2 * half, seed=seed, spread=3).to(way.device, dtype).requires_grad_()
    weight = (1 + normal(2 * half, seed=seed + 1)).to(way.device).requires_grad_() if parts != "rotation" else None
    drawn = angles(tokens, 2 * half, seed=seed + 2) if parts != "norm" else None
    rotary = None if drawn is None else (drawn[0].to(way.device), drawn[1].to(way.device))
    gradient = normal(tokens, heads, 2 * half, seed=seed + 3).to(way.device, dtype)
    out = rms_norm(x, weight, EPS, rotary)
    assert out.dtype == dtype and out.shape == x.shape
    assert relative_error(out, defined(x, weight, rotary)) < bound(dtype)
    leaves = [leaf for leaf in (x, weight) if leaf is not None]
    found = torch.autograd.grad(out, leaves, gradient)
    for ours, wanted in zip(found, slopes(gradient, x, weight, rotary), strict=True):
        assert relative_error(ours, wanted) < bound(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("columns", "heads"), [(128, 32), *(pytest.param(columns, 1, marks=pytest.mark.slow) for columns in (2048, 2056))]
)
def test_sizes_of_models(way: Way, columns: int, heads: int, dtype: torch.dtype) -> None:
    """More rows than a pass of the backward's programs holds; on a GPU 16,384 tokens."""
    tokens = way.pick(70 if heads == 1 else 10, 16384)
    x = normal(tokens, heads, columns, seed=1).to(way.device, dtype).requires_grad_()
    weight = (1 + 0.1 * normal(columns, seed=2)).to(way.device, dtype).requires_grad_()
    drawn = angles(tokens, columns)
    rotary = drawn[0].to(way.device), drawn[1].to(way.device)
    gradient = normal(tokens, heads, columns, seed=3).to(way.device, dtype)
    out = rms_norm(x, weight, EPS, rotary)
    assert relative_error(out, defined(x, weight, rotary)) < bound(dtype)
    of_x, of_weight = torch.autograd.grad(out, (x, weight), gradient)
    wanted_x, wanted_weight = slopes(gradient, x, weight, rotary)
    assert of_weight.dtype == weight.dtype
    assert relative_error(of_x, wanted_x) < bound(dtype)
    assert relative_error(of_weight, wanted_weight) < bound(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_finite_without_eps(way: Way, dtype: torch.dtype) -> None:
    """The default; of 5 rows the last tile is not full."""
    x = normal(5, 96, seed=1).to(way.device, dtype).requires_grad_()
    weight = (1 + normal(96, seed=2)).to(way.device).requires_grad_()
    gradient = normal(5, 96, seed=3).to(way.device, dtype)
    found = torch.autograd.grad(rms_norm(x, weight), (x, weight), gradient)
    for ours, wanted in zip(found, slopes(gradient, x, weight, None, eps=0.0), strict=True):
        assert relative_error(ours, wanted) < bound(dtype)


@pytest.mark.parametrize("name", [name for name in FINITE if name not in ("huge", "denormals", "tiny")])
def test_every_kind_of_input(way: Way, name: str) -> None:
    x = FINITE[name](50, 256, 3).to(way.device)
    weight = torch.ones(256, device=way.device)
    torch.testing.assert_close(rms_norm(x, weight, EPS).double(), defined(x, weight, None), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NOT_FINITE)
def test_what_is_not_finite_stays_visible_in_its_row(way: Way, name: str) -> None:
    x = NOT_FINITE[name](100, 64, 3).to(way.device).requires_grad_()
    at = int((~torch.isfinite(x)).any(1).nonzero())
    out = rms_norm(x, torch.ones(64, device=way.device), EPS)
    (of_x,) = torch.autograd.grad(out, x, normal(100, 64).to(way.device))
    for found in (out, of_x):
        assert (~torch.isfinite(found)).any(1).nonzero().flatten().tolist() == [at]


def test_bfloat16_is_rounded_where_transformers_rounds_it(way: Way) -> None:
    """Its Qwen3MoeRMSNorm and apply_rotary_pos_emb; vLLM's norm and rotation round there, too."""
    x = normal(40, 4, 64, spread=2).bfloat16().to(way.device)
    weight = (1 + 0.2 * normal(64, seed=1)).bfloat16().to(way.device)
    cosine, sine = (part.to(way.device) for part in angles(40, 64))
    wide = x.float()
    normed = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).bfloat16()
    first, second = normed.chunk(2, dim=-1)
    turned = normed * cosine.bfloat16() + torch.cat([-second, first], dim=-1) * sine.bfloat16()
    # a mean that is summed in another order moves few values to the next number
    assert float((rms_norm(x, weight, EPS) != normed).double().mean()) < 2e-3
    assert float((rms_norm(x, weight, EPS, (cosine, sine)) != turned).double().mean()) < 2e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_normalized_values_are_rounded_before_the_rotation(way: Way, dtype: torch.dtype) -> None:
    """As an engine computes it, whose norm writes its result in the activations' dtype."""
    x, weight = normal(40, 4, 64, spread=2).to(way.device, dtype), (1 + normal(64, seed=1)).to(way.device)
    cosine, sine = (part.to(way.device) for part in angles(40, 64))
    apart = rms_norm(rms_norm(x, weight, EPS), None, rotary=(cosine, sine))
    assert torch.equal(rms_norm(x, weight, EPS, (cosine, sine)), apart)


def test_a_search_leaves_no_trace_in_the_gradient_of_the_weight(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search launches every configuration before the chosen one, and compares what each launch returns."""
    if way.name == "reference":
        pytest.skip("searches nothing")
    from triplane_kernels import norm_triton

    def lookup(
        op: str,
        shape: tuple[int, ...],
        known: list[Config],
        run: Callable[[Config], Sequence[Tensor]],
        *,
        small: Config,
    ) -> Config:
        candidates = [small | {"VALUES": values} for values in (128, 256, 512)]
        returned = [run(candidate)[1].clone() for candidate in candidates]
        assert all(relative_error(one, returned[0]) < EXACT for one in returned)
        return candidates[-1]

    monkeypatch.setattr(norm_triton, "lookup", lookup)
    x, gradient = (normal(8, 64, seed=seed).to(way.device) for seed in (0, 1))
    weight = (1 + normal(64, seed=2)).to(way.device)
    found = norm_triton.rms_norm_backward(gradient, x, weight, None, None, EPS)
    for ours, wanted in zip(found, slopes(gradient, x, weight, None), strict=True):
        assert relative_error(ours, wanted) < EXACT


def test_a_strided_weight(way: Way) -> None:
    x, gradient = (normal(8, 64, seed=seed).to(way.device).requires_grad_() for seed in (0, 1))
    weight = normal(128, seed=2).to(way.device)[::2].requires_grad_()
    out = rms_norm(x, weight, EPS)
    assert relative_error(out, defined(x, weight, None)) < EXACT
    found = torch.autograd.grad(out, (x, weight), gradient)
    for ours, wanted in zip(found, slopes(gradient, x, weight, None), strict=True):
        assert relative_error(ours, wanted) < EXACT


def test_gradcheck() -> None:
    x, weight = normal(3, 2, 8, spread=2).double().requires_grad_(), normal(8, seed=1).double().requires_grad_()
    cosine, sine = (part.double() for part in angles(3, 8))
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, EPS, (cosine, sine)), (x, weight))
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, None, rotary=(cosine, sine)), (x,))


def test_torch_finds_no_fault_in_the_operators(way: Way) -> None:
    operators = torch.ops.triplane
    x, gradient = normal(6, 2, 16).to(way.device), normal(6, 2, 16, seed=1).to(way.device)
    weight = normal(16, seed=2).to(way.device)
    cosine, sine = (part.to(way.device) for part in angles(6, 16))
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    torch.library.opcheck(operators.rms_norm.default, (*leaves, cosine, sine, EPS))
    torch.library.opcheck(operators.rms_norm_backward.default, (gradient, x, weight, cosine, sine, EPS))
    torch.library.opcheck(operators.rms_norm_backward.default, (gradient, x, None, cosine, sine, EPS))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(KernelInputError, match=r"x must be \[T, D\] or \[T, N, D\], weight \[D\]"):
        rms_norm(normal(3, 6), normal(5), EPS)
    with pytest.raises(KernelInputError, match=r"x must be"):
        rms_norm(normal(3, 2, 2, 6), normal(6), EPS)
    with pytest.raises(KernelInputError, match=r"cosine and sine must be \[T, 1, D\] with an even D"):
        rms_norm(normal(3, 2, 6), normal(6), EPS, (normal(3, 6), normal(3, 6)))
    with pytest.raises(KernelInputError, match=r"an even D"):
        rms_norm(normal(3, 2, 5), normal(5), EPS, angles(3, 5))
