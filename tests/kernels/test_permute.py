"""Token permutation: every row where the definition puts it, gradients exact, padding never seen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_inputs import EXACT, FINITE, Way, generator, normal, relative_error
from torch import Tensor
from triplane_kernels.errors import KernelInputError
from triplane_kernels.permute import permute, permute_rows, plan_permutation, unpermute

SETTINGS = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def routed(tokens: int, k: int, num_experts: int, seed: int, *, dropped: bool = False) -> Tensor:
    """int32 [T, k]; with dropped, some pairs name no expert."""
    low, high = (-1, num_experts + 1) if dropped else (0, num_experts)
    return torch.randint(low, high, (tokens, k), generator=generator(seed), dtype=torch.int32)


def by_definition(experts: Tensor, num_experts: int, block: int) -> tuple[list[int], dict[int, int]]:
    """Offsets, and row -> pair, one pair after the other."""
    offsets, filled = [0], {}
    flat = experts.flatten().tolist()
    for expert in range(num_experts):
        pairs = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        filled.update({offsets[-1] + rank: pair for rank, pair in enumerate(pairs)})
        offsets.append(offsets[-1] + -(-len(pairs) // block) * block)
    return offsets, filled


@SETTINGS
@given(
    tokens=st.integers(0, 70),
    k=st.integers(1, 4),
    num_experts=st.integers(1, 9),
    block=st.sampled_from([1, 16, 128]),
    width=st.integers(0, 150),
    seed=st.integers(0, 99),
)
def test_rows_are_where_the_definition_puts_them(
    way: Way, tokens: int, k: int, num_experts: int, block: int, width: int, seed: int
) -> None:
    experts = routed(tokens, k, num_experts, seed, dropped=True)
    x = normal(tokens, width, seed=seed)
    permuted = permute(x.to(way.device), experts.to(way.device), num_experts, block=block)
    offsets, filled = by_definition(experts, num_experts, block)
    assert permuted.offsets.tolist() == offsets
    count = permuted.source.numel()
    assert permuted.rows.shape == (count, width) and count >= offsets[-1] and count % block == 0
    source = [filled.get(row, -1) for row in range(count)]
    assert permuted.source.tolist() == source
    rows = torch.stack([x[pair // k] if pair >= 0 else torch.zeros(width) for pair in source]) if count else x[:0]
    assert torch.equal(permuted.rows.cpu(), rows)
    position = torch.full((tokens * k,), -1, dtype=torch.int32)
    for row, pair in filled.items():
        position[pair] = row
    assert torch.equal(permuted.position.cpu(), position.view(tokens, k))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FINITE)
def test_unpermuting_weighs_and_sums_a_tokens_rows(way: Way, name: str, dtype: torch.dtype) -> None:
    (tokens, width), num_experts, k = way.pick((40, 150), (5000, 2056)), way.pick(5, 128), way.pick(3, 8)
    x = (FINITE[name](tokens, width, 1) / 16).to(way.device, dtype)
    experts = routed(tokens, k, num_experts, 2, dropped=True).to(way.device)
    weights = normal(tokens, k, seed=3).to(way.device)
    permuted = permute(x, experts, num_experts)
    found = unpermute(permuted.rows, permuted, weights)
    kept = (experts >= 0) & (experts < num_experts)
    wanted = x.double() * (weights.double() * kept).sum(1, keepdim=True)
    assert found.dtype == dtype and found.shape == x.shape
    # bfloat16 holds 8 bits; below 2^-133 not even that
    assert (
        relative_error(found, wanted) < (1e-6 if dtype == torch.float32 else 2e-3) or float(wanted.abs().max()) < 1e-30
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_float64(way: Way, dtype: torch.dtype) -> None:
    (tokens, width), num_experts, k = way.pick((40, 150), (5000, 2056)), way.pick(5, 128), way.pick(3, 8)
    experts = routed(tokens, k, num_experts, 4, dropped=True).to(way.device)
    x, outer = (normal(tokens, width, seed=seed).to(way.device, dtype) for seed in (5, 6))
    weights = normal(tokens, k, seed=7).to(way.device).requires_grad_()
    permuted = permute(x.requires_grad_(), experts, num_experts, block=16)
    permuted.rows.retain_grad()
    (unpermute(permuted.rows * permuted.rows, permuted, weights) * outer).sum().backward()
    assert not permuted.rows.grad[permuted.source < 0].any()

    kept = (experts >= 0) & (experts < num_experts)
    exact, exact_weights = (leaf.detach().double().requires_grad_() for leaf in (x, weights))
    (exact.square() * (exact_weights * kept).sum(1, keepdim=True) * outer).sum().backward()
    bound = EXACT if dtype == torch.float32 else 6e-3
    assert relative_error(x.grad, exact.grad) < bound and relative_error(weights.grad, exact_weights.grad) < bound


def test_gradcheck() -> None:
    experts = routed(7, 2, 3, 8, dropped=True)
    x, weights = (normal(*shape).double().requires_grad_() for shape in ((7, 3), (7, 2)))

    def both(x: Tensor, weights: Tensor) -> Tensor:
        permuted = permute(x, experts, 3, block=4)
        return unpermute(permuted.rows.sin(), permuted, weights)

    assert torch.autograd.gradcheck(both, (x, weights))


def test_a_row_that_is_not_finite_stays_with_its_token_and_padding_never_counts(way: Way) -> None:
    experts = routed(40, 2, 3, 9).to(way.device)
    x = normal(40, 70).to(way.device)
    x[7] = float("nan")
    permuted = permute(x, experts, 3)
    assert int(permuted.rows.isnan().any(1).sum()) == 2
    rows = torch.where((permuted.source < 0)[:, None], float("nan"), permuted.rows).requires_grad_()
    out = unpermute(rows, permuted, torch.ones(40, 2, device=way.device))
    assert out.isnan().any(1).nonzero().flatten().tolist() == [7]
    out[:7].sum().backward()
    assert bool(torch.isfinite(rows.grad).all())


def test_codes_and_scales_follow_one_plan(way: Way) -> None:
    codes = torch.arange(40 * 256, dtype=torch.int32).remainder(251).to(torch.uint8).view(40, 256).to(way.device)
    scales = normal(40, 2).to(way.device)
    plan = plan_permutation(routed(40, 2, 3, 9).to(way.device), 3)
    rows, row_scales = permute_rows(codes.view(torch.float8_e4m3fn), plan), permute_rows(scales, plan)
    real = (plan.source >= 0).nonzero().flatten()
    tokens = plan.source[real].long() // 2
    assert rows.dtype == torch.float8_e4m3fn and torch.equal(rows.view(torch.uint8)[real], codes[tokens])
    assert torch.equal(row_scales[real], scales[tokens]) and not rows.view(torch.uint8)[plan.source < 0].any()


def test_the_shape_depends_on_shapes_alone_and_holds_every_routing() -> None:
    everything_to_one = torch.zeros(50, 2, dtype=torch.int32)
    one_each = torch.arange(100, dtype=torch.int32).view(50, 2) % 7
    plans = [plan_permutation(experts, 7, block=128) for experts in (everything_to_one, one_each)]
    assert plans[0].source.shape == plans[1].source.shape
    assert plans[0].offsets.tolist() == [0, *[128] * 7] and plans[1].offsets.tolist() == [*range(0, 897, 128)]


def test_torch_finds_no_fault_in_the_operators(way: Way) -> None:
    experts = routed(9, 2, 3, 1).to(way.device)
    operators = torch.ops.triplane
    plan = plan_permutation(experts, 3, block=16)
    x, rows, weights = (
        normal(*shape).to(way.device).requires_grad_() for shape in ((9, 20), (plan.source.numel(), 20), (9, 2))
    )
    torch.library.opcheck(operators.permute_plan.default, (experts, 3, 16))
    torch.library.opcheck(operators.permute.default, (x, plan.source, plan.position))
    torch.library.opcheck(operators.unpermute.default, (rows, plan.source, plan.position, weights))


def test_what_does_not_fit_is_refused() -> None:
    x, experts = normal(4, 8), routed(4, 2, 3, 0)
    with pytest.raises(KernelInputError, match=r"experts must be int32 or int64 \[T, k\]"):
        permute(x, experts.float(), 3)
    with pytest.raises(KernelInputError, match="num_experts"):
        permute(x, experts, 0)
    with pytest.raises(KernelInputError, match=r"pass 2\^31 rows"):
        plan_permutation(torch.zeros(2**20, 2**11, dtype=torch.int32, device="meta"), 3)
    with pytest.raises(KernelInputError, match="4 tokens of the plan"):
        permute(x[:3], experts, 3)
    permuted = permute(x, experts, 3)
    with pytest.raises(KernelInputError, match="of the plan"):
        unpermute(permuted.rows[1:], permuted, normal(4, 2))
