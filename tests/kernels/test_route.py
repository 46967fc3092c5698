"""The top-k router: the choice exact and deterministic, weights and gradients those of float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_inputs import EXACT, FINITE, Way, normal, relative_error
from torch import Tensor
from triplane_kernels.errors import KernelInputError
from triplane_kernels.router import route
from triplane_kernels.router_reference import TINY

# NumPy computes what the interpreter runs, and says where it overflows.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
SETTINGS = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCORES = ["softmax", "sigmoid"]
NAN, INFINITY = float("nan"), float("inf")


def scored(logits: Tensor, scores: str) -> Tensor:
    """By definition, in float64."""
    wide = logits.double()
    return wide.sigmoid() if scores == "sigmoid" else (wide - wide.logsumexp(-1, keepdim=True)).exp()


def weighed(every: Tensor, experts: Tensor, normalize: bool) -> Tensor:
    """By definition: with the small number in the sum, which rules where a bias picks scores that all underflow."""
    picked = every.gather(1, experts.long())
    return picked / (picked.sum(1, keepdim=True) + TINY) if normalize else picked


@SETTINGS
@given(
    tokens=st.integers(0, 70),
    num_experts=st.integers(1, 70),
    data=st.data(),
    scores=st.sampled_from(SCORES),
    normalize=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_largest_logits_are_chosen_in_order(
    way: Way, tokens: int, num_experts: int, data: st.DataObject, scores: str, normalize: bool, seed: int
) -> None:
    k = data.draw(st.integers(1, min(num_experts, 9)))
    logits = normal(tokens, num_experts, seed=seed, spread=2).bfloat16().to(way.device)
    weights, experts = route(logits, k, scores=scores, normalize=normalize)
    # bfloat16 logits are often equal: the lower index comes first
    wanted = logits.float().sort(dim=1, descending=True, stable=True).indices[:, :k]
    assert experts.dtype == torch.int32 and torch.equal(experts.long(), wanted)
    assert weights.dtype == torch.float32 and weights.shape == (tokens, k)
    # a GPU's exponential and quotient are a few units in the last place off
    torch.testing.assert_close(
        weights.double(), weighed(scored(logits, scores), experts, normalize), rtol=way.pick(2e-6, 1e-5), atol=1e-30
    )


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("name", [name for name in FINITE if name != "huge"])
def test_weights_on_every_kind_of_input(way: Way, name: str, scores: str) -> None:
    tokens, num_experts, k = way.pick((60, 40, 4), (20000, 256, 8))
    logits = FINITE[name](tokens, num_experts, 2).clamp(-60, 60).to(way.device)
    bias = normal(num_experts, seed=1, spread=0.1).to(way.device)
    for normalize in (False, True):
        weights, experts = route(logits, k, bias=bias, scores=scores, normalize=normalize)
        every = scored(logits, scores)
        torch.testing.assert_close(weights.double(), weighed(every, experts, normalize), rtol=2e-5, atol=1e-19)
        keys = every + bias.double()
        best = keys.topk(k, dim=1).values
        torch.testing.assert_close(keys.gather(1, experts.long()), best, rtol=0, atol=1e-6)


def test_a_bias_moves_the_choice_and_never_the_weight(way: Way) -> None:
    logits = normal(50, 16).to(way.device)
    bias = torch.zeros(16, device=way.device)
    bias[3] = 100
    weights, experts = route(logits, 2, bias=bias, scores="sigmoid", normalize=False)
    assert bool((experts[:, 0] == 3).all()) and float(weights.max()) <= 1
    assert torch.equal(experts[:, 1:], _best_but(logits, 3))
    bias[3] = -INFINITY
    assert not bool((route(logits, 2, bias=bias, scores="sigmoid")[1] == 3).any())


def _best_but(logits: Tensor, excluded: int) -> Tensor:
    others = logits.clone()
    others[:, excluded] = -INFINITY
    return others.argmax(1, keepdim=True).int()


def test_equal_logits_go_to_the_lowest_expert_and_signs_of_zero_are_equal(way: Way) -> None:
    logits = torch.zeros(3, 6, device=way.device)
    logits[1, ::2] = -0.0
    logits[2, 4:] = 1.0
    assert route(logits, 3)[1].tolist() == [[0, 1, 2], [0, 1, 2], [4, 5, 0]]


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("bad", [NAN, INFINITY, -INFINITY])
def test_what_is_not_finite_is_seen_and_experts_stay_valid(way: Way, bad: float, scores: str) -> None:
    logits = normal(8, 10).to(way.device)
    logits[3, 6] = bad
    logits[5] = bad
    weights, experts = route(logits, 4, scores=scores)
    assert all(len(set(row)) == 4 and min(row) >= 0 and max(row) < 10 for row in experts.tolist())
    healthy = [0, 1, 2, 4, 6, 7]
    assert bool(torch.isfinite(weights[healthy]).all())
    if bad != bad or (bad == INFINITY and scores == "softmax"):
        assert bool(weights[3].isnan().any()) and experts[3, 0] == 6
    if bad == -INFINITY:
        assert 6 not in experts[3].tolist() and bool(torch.isfinite(weights[3]).all())


def test_scores_that_underflow_give_zeros_and_never_nan(way: Way) -> None:
    logits = torch.full((2, 8), -500.0, device=way.device, requires_grad=True)
    weights, _ = route(logits, 2, scores="sigmoid")
    weights.sum().backward()
    assert not weights.any() and not logits.grad.any()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_float64(way: Way, dtype: torch.dtype, scores: str, normalize: bool) -> None:
    tokens, num_experts, k = way.pick((60, 40, 4), (20000, 256, 8))
    logits = normal(tokens, num_experts, seed=5).to(way.device, dtype).requires_grad_()
    outer = normal(tokens, k, seed=6).to(way.device)
    weights, experts = route(logits, k, scores=scores, normalize=normalize)
    (weights * outer).sum().backward()
    exact = logits.detach().double().requires_grad_()
    (weighed(scored(exact, scores), experts, normalize) * outer).sum().backward()
    assert logits.grad.dtype == dtype
    assert relative_error(logits.grad, exact.grad) < (EXACT if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scores", SCORES)
def test_gradcheck(scores: str, normalize: bool) -> None:
    logits = normal(5, 7).double().requires_grad_()
    bias = normal(7, seed=1).double()
    assert torch.autograd.gradcheck(
        lambda given: route(given, 3, bias=bias, scores=scores, normalize=normalize)[0], (logits,)
    )


def test_torch_finds_no_fault_in_the_operator(way: Way) -> None:
    logits, bias = normal(9, 12).to(way.device).requires_grad_(), normal(12).to(way.device)
    torch.library.opcheck(torch.ops.triplane.route.default, (logits, 3, bias, "sigmoid", True))
    torch.library.opcheck(torch.ops.triplane.route.default, (logits, 3, None, "softmax", False))


def test_what_does_not_fit_is_refused() -> None:
    logits = normal(4, 8)
    with pytest.raises(KernelInputError, match="1 <= k <= E"):
        route(logits, 9)
    with pytest.raises(KernelInputError, match="no scores 'tanh'"):
        route(logits, 2, scores="tanh")
    with pytest.raises(KernelInputError, match="one for each of 8 experts"):
        route(logits, 2, bias=normal(7))
