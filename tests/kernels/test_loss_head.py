"""The fused loss head against the whole logits in float64, which it must never build itself."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_inputs import EXACT, Way, generator, heavy_tailed, normal, outlier_a_block, relative_error
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triplane_kernels import loss_head_reference
from triplane_kernels.errors import KernelInputError
from triplane_kernels.loss_head import loss_head
from triplane_kernels.loss_head_reference import Gradients, Head, Sums

# NumPy computes what the interpreter runs, and says where it overflows.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
SETTINGS = settings(max_examples=7, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
NAN, INFINITY = float("nan"), float("inf")
CHUNK = 96
"""Vocabulary entries a chunk in these tests, so that small vocabularies take several."""


@pytest.fixture(autouse=True)
def _small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loss_head_reference, "CHUNK", CHUNK)
    monkeypatch.setattr(loss_head_reference, "ROWS", 24)
    # the fixture `way` first: what is imported before it is not interpreted
    if "way" in request.fixturenames and request.getfixturevalue("way").name == "interpreter":
        from triplane_kernels import loss_head_triton

        monkeypatch.setattr(loss_head_triton, "SLOPES", 1)
        monkeypatch.setattr(loss_head_triton, "CHUNK_STEP", CHUNK)
    yield


def inputs(tokens: int, vocabulary: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight with logits of about unit spread, and targets."""
    hidden, weight = normal(tokens, width, seed=seed), normal(vocabulary, width, seed=seed + 1) * width**-0.5
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=generator(seed))


def masks(kind: int, tokens: int, vocabulary: int, targets: Tensor) -> Tensor | None:
    """None, [V] or [T, V]; the last allows every target."""
    if kind == 0:
        return None
    allowed = torch.rand((vocabulary,) if kind == 1 else (tokens, vocabulary), generator=generator(kind)) < 0.5
    return allowed.scatter_(-1, targets if kind == 1 else targets[:, None], True)


def defined(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, allowed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """By definition, all logits at once."""
    logits = hidden @ weight.mT / temperature
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -INFINITY)
    logprobs = logits.log_softmax(-1)
    finite = logprobs.masked_fill(logprobs == -INFINITY, 0)
    entropy = -(logprobs.exp() * finite).sum(-1)
    return logprobs.gather(1, targets[:, None].long()).squeeze(1), entropy


def compared(
    way: Way,
    given_inputs: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype,
    temperature: float,
    allowed: Tensor | None,
) -> None:
    """Results and gradients of the operator in `dtype` against the definition in float64, on the same numbers."""
    hidden, weight = (part.to(way.device, dtype).requires_grad_() for part in given_inputs[:2])
    targets = given_inputs[2].to(way.device)
    allowed = None if allowed is None else allowed.to(way.device)
    outer = [normal(len(targets), seed=seed).to(way.device) for seed in (7, 8)]
    found = loss_head(hidden, weight, targets, temperature=temperature, allowed=allowed)
    assert all(part.dtype == torch.float32 and part.shape == targets.shape for part in found)
    sum((part * by).sum() for part, by in zip(found, outer, strict=True)).backward()
    exact_hidden, exact_weight = (part.detach().double().requires_grad_() for part in (hidden, weight))
    exact = defined(exact_hidden, exact_weight, targets, temperature, allowed)
    sum((part * by).sum() for part, by in zip(exact, outer, strict=True)).backward()
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=EXACT, atol=2e-5)
    bound = EXACT if dtype == torch.float32 else 5e-3
    assert relative_error(hidden.grad, exact_hidden.grad) < bound and hidden.grad.dtype == dtype
    assert relative_error(weight.grad, exact_weight.grad) < bound and weight.grad.dtype == dtype


@SETTINGS
@given(
    tokens=st.integers(0, 40),
    vocabulary=st.integers(2, 260),
    width=st.integers(1, 70),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    mask=st.integers(0, 2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_any_shape_temperature_and_mask(
    way: Way, tokens: int, vocabulary: int, width: int, temperature: float, mask: int, dtype: torch.dtype, seed: int
) -> None:
    given_inputs = inputs(tokens, vocabulary, width, seed)
    allowed = masks(mask, tokens, vocabulary, given_inputs[2])
    compared(way, given_inputs, dtype, temperature, allowed)


@pytest.mark.parametrize("mask", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_that_fill_and_tiles_that_do_not(way: Way, dtype: torch.dtype, mask: int) -> None:
    tokens, vocabulary, width = way.pick((64, 256, 64), (2000, 20000, 1024))
    given_inputs = inputs(tokens, vocabulary, width, 3)
    compared(way, given_inputs, dtype, 0.8, masks(mask, tokens, vocabulary, given_inputs[2]))


def test_gradients_keep_their_precision_beside_a_large_common_logit(way: Way) -> None:
    """Logits are 65,536 plus small multiples of 1/64, all exact in float32."""
    hidden, weight, targets = inputs(20, 150, 16)
    hidden, weight = (2 * hidden).round().clamp(-4, 4), (64 * weight).round().clamp(-128, 128) / 64
    hidden[:, 0] = weight[:, 0] = 256
    hidden, weight = (part.to(way.device).requires_grad_() for part in (hidden, weight))
    exact = [part.detach().double().requires_grad_() for part in (hidden, weight)]
    targets = targets.to(way.device)
    loss_head(hidden, weight, targets)[0].sum().backward()
    defined(exact[0], exact[1], targets, 1.0, None)[0].sum().backward()
    for found, wanted in zip((hidden, weight), exact, strict=True):
        # slopes that cancel, times 256, remain
        assert relative_error(found.grad, wanted.grad) < 1e-4


@pytest.mark.parametrize("kind", ["heavy_tailed", "outlier_a_block", "zeros", "steep", "equal"])
def test_adversarial_logits(way: Way, kind: str) -> None:
    tokens, vocabulary, width = way.pick((40, 200, 48), (500, 9000, 512))
    hidden, weight, targets = inputs(tokens, vocabulary, width, 5)
    hidden = {
        "heavy_tailed": heavy_tailed(tokens, width, 1),
        "outlier_a_block": outlier_a_block(tokens, width, 1) / 100,
        "zeros": torch.zeros(tokens, width),
        "steep": hidden * 300,
        "equal": hidden + 50,
    }[kind]
    hidden, weight, targets = hidden.to(way.device), weight.to(way.device), targets.to(way.device)
    found = loss_head(hidden, weight, targets)
    wanted = defined(hidden.double(), weight.double(), targets, 1.0, None)
    # logits carry float32's rounding of their own size
    size = float((hidden.double() @ weight.double().mT).abs().max())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=EXACT, atol=2e-5 + size * 1e-6)
    assert float(found[0].max()) <= 0 and float(found[1].min()) >= -1e-6
    if kind == "zeros":
        torch.testing.assert_close(found[1], torch.full_like(found[1], math.log(vocabulary)))


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_head_reference, "CHUNK", 16)
    hidden, weight, targets = inputs(4, 26, 2)
    allowed = masks(2, 4, 26, targets)
    leaves = hidden.double().requires_grad_(), weight.double().requires_grad_()
    for mask in (None, allowed):
        assert torch.autograd.gradcheck(
            lambda hidden, weight, mask=mask: loss_head(hidden, weight, targets, temperature=0.7, allowed=mask), leaves
        )


def test_one_allowed_token_is_certain_and_has_no_gradient(way: Way) -> None:
    hidden, weight, targets = (part.to(way.device) for part in inputs(6, 150, 16))
    allowed = torch.zeros(6, 150, dtype=torch.bool, device=way.device).scatter_(1, targets[:, None], True)
    logprobs, entropy = loss_head(hidden.requires_grad_(), weight.requires_grad_(), targets, allowed=allowed)
    (logprobs + entropy).sum().backward()
    assert not logprobs.any() and not entropy.any()
    for gradient in (hidden.grad, weight.grad):  # backward computes the logits again, which may round otherwise
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-6)


def test_a_target_that_is_not_allowed_is_impossible_and_gradients_stay_finite(way: Way) -> None:
    hidden, weight, targets = (part.to(way.device) for part in inputs(6, 150, 16))
    allowed = torch.ones(150, dtype=torch.bool, device=way.device)
    allowed[targets[2]] = False
    logprobs, entropy = loss_head(hidden.requires_grad_(), weight.requires_grad_(), targets, allowed=allowed)
    impossible = targets == targets[2]
    assert bool((logprobs[impossible] == -INFINITY).all()) and bool(torch.isfinite(logprobs[~impossible]).all())
    logprobs.sum().backward()
    assert bool(torch.isfinite(hidden.grad).all()) and bool(torch.isfinite(weight.grad).all())
    assert not weight.grad[targets[2]].any() and bool(torch.isfinite(entropy).all())


@pytest.mark.parametrize("fault", ["nan", "infinity", "target too large", "negative target", "nothing allowed"])
def test_a_faulty_token_is_nan_and_leaves_the_others_alone(way: Way, fault: str) -> None:
    hidden, weight, targets = (part.to(way.device) for part in inputs(40, 150, 16))
    allowed = torch.ones(40, 150, dtype=torch.bool, device=way.device)
    if fault == "nothing allowed":
        allowed[5] = False
    elif fault in ("nan", "infinity"):
        hidden[5, 3] = NAN if fault == "nan" else INFINITY
    else:
        targets[5] = 150 if fault == "target too large" else -1
    logprobs, entropy = loss_head(hidden.requires_grad_(), weight.requires_grad_(), targets, allowed=allowed)
    assert (~torch.isfinite(logprobs)).nonzero().flatten().tolist() == [5] and bool(logprobs[5].isnan())
    assert bool(torch.isfinite(entropy[:5]).all()) and bool(torch.isfinite(entropy[6:]).all())
    logprobs.sum().backward()
    assert bool(hidden.grad[5].isnan().all()) and (~torch.isfinite(hidden.grad)).any(
        1
    ).nonzero().flatten().tolist() == [5]
    assert bool(weight.grad.isnan().any())


def test_a_gradient_that_nobody_asks_for_is_not_computed(way: Way) -> None:
    hidden, weight, targets = (part.to(way.device) for part in inputs(6, 150, 16))
    loss_head(hidden, weight.requires_grad_(), targets)[0].sum().backward()
    both = hidden.clone().requires_grad_(), weight.detach().clone().requires_grad_()
    loss_head(*both, targets)[0].sum().backward()
    assert hidden.grad is None and torch.equal(weight.grad, both[1].grad)
    arguments = (hidden[:, 0], hidden[:, 0], hidden, weight.detach(), targets, 1.0, None, *[hidden[:, 0]] * 3)
    of_hidden, of_weight = torch.ops.triplane.loss_head_backward(*arguments, True, False)
    assert of_hidden.shape == hidden.shape and of_weight.numel() == 0


class _Largest(TorchDispatchMode):
    """Bytes of the largest tensor that any torch operator returns inside."""

    size = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(part, Tensor):
                self.size = max(self.size, part.nbytes)
        return result


@pytest.mark.slow
def test_no_tensor_is_as_large_as_a_fifth_of_the_logits(way: Way) -> None:
    tokens, vocabulary, width = way.pick((128, 800, 8), (4096, 151936, 256))
    hidden, weight, targets = (part.to(way.device) for part in inputs(tokens, vocabulary, width))
    column = torch.ones(tokens, device=way.device)
    if way.name == "reference":
        forward, backward = loss_head_reference.loss_head_reference, loss_head_reference.loss_head_backward_reference
    else:
        from triplane_kernels import loss_head_triton

        forward, backward = loss_head_triton.loss_head_triton, loss_head_triton.loss_head_backward_triton
    if way.name == "gpu":
        hidden, weight = hidden.bfloat16(), weight.bfloat16()
        torch.cuda.reset_peak_memory_stats()
    with _Largest() as seen:
        head = Head(hidden, weight, targets, 1.0, None)
        _, entropy, peak, log_mass = forward(head)
        into = Gradients(torch.empty_like(hidden), torch.empty_like(weight))
        backward(head, Sums(column, column, entropy, peak, log_mass), into)
    if way.name == "gpu":
        assert torch.cuda.max_memory_allocated() < tokens * vocabulary * 2
    else:
        assert seen.size <= tokens * vocabulary * 4 // 5


def test_configurations_are_kept_apart_where_they_take_other_room(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits bfloat16 without a mask need not fit float32, nor a mask of [T, V]."""
    if way.name == "reference":
        pytest.skip("has no configurations")
    from triplane_kernels import loss_head_triton

    asked, lookup = [], loss_head_triton.lookup
    monkeypatch.setattr(
        loss_head_triton, "lookup", lambda op, *given, **more: asked.append(op) or lookup(op, *given, **more)
    )
    given_inputs = inputs(6, 150, 16)
    for dtype, mask in ((torch.bfloat16, 0), (torch.bfloat16, 2), (torch.float32, 0)):
        hidden, weight = (part.to(way.device, dtype).requires_grad_() for part in given_inputs[:2])
        allowed = masks(mask, 6, 150, given_inputs[2])
        allowed = None if allowed is None else allowed.to(way.device)
        loss_head(hidden, weight, given_inputs[2].to(way.device), allowed=allowed)[0].sum().backward()
    assert {name.removeprefix("loss_head").replace("_backward", "") for name in asked} == {"", "_masked", "_float32"}


def test_torch_finds_no_fault_in_the_operators(way: Way) -> None:
    hidden, weight, targets = (part.to(way.device) for part in inputs(6, 150, 16))
    allowed = masks(2, 6, 150, targets.cpu()).to(way.device)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    torch.library.opcheck(torch.ops.triplane.loss_head.default, (*leaves, targets, 0.7, allowed))
    torch.library.opcheck(torch.ops.triplane.loss_head.default, (leaves[0].detach(), leaves[1], targets, 0.7, None))


def test_what_does_not_fit_is_refused() -> None:
    hidden, weight, targets = inputs(6, 150, 16)
    for fault, match in (
        ((hidden[:, 1:], weight, targets), r"must be \[T, H\], \[V, H\]"),
        ((hidden.bfloat16(), weight, targets), "must have one float dtype"),
        ((hidden, weight, targets[1:]), r"targets must be int32 or int64 \[6\]"),
        ((hidden, weight, targets.float()), "targets must be int32 or int64"),
    ):
        with pytest.raises(KernelInputError, match=match):
            loss_head(*fault)
    with pytest.raises(KernelInputError, match="temperature must be above 0, not 0"):
        loss_head(hidden, weight, targets, temperature=0)
    with pytest.raises(KernelInputError, match="allowed must be bool"):
        loss_head(hidden, weight, targets, allowed=torch.ones(6, dtype=torch.bool))
