"""Language model head for a policy loss, without materializing the [tokens, vocabulary] logits.

    hidden [T, H], weight [V, H], targets [T] --> logprob of each target, entropy of each distribution

Forward reduces each tile of logits and discards it. Backward recomputes the logits, one chunk of the vocabulary at a
time. Sources: online softmax (arXiv:1805.02867), Cut Your Losses (arXiv:2411.09009).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from triplane_kernels.custom_ops import operator
from triplane_kernels.errors import KernelInputError
from triplane_kernels.loss_head_reference import (
    Gradients,
    Head,
    Sums,
    loss_head_backward_reference,
    loss_head_reference,
)
from triplane_kernels.machine import choose
from triplane_kernels.tuning import workload

SHAPES = [(8192, 151936, 4096), (8192, 151936, 2048), (2048, 129280, 7168)]


def loss_head(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """log p(target) and the entropy of p = softmax(hidden @ weight.T / temperature), over the allowed tokens only.

    hidden: [T, H] and weight: [V, H], both float32, bfloat16 or float16. targets: int64 or int32 [T]. allowed: bool
    [V], or [T, V]; None allows all. Returns logprobs and entropy, each float32 [T], in nats; both are differentiable in
    hidden and weight. Float64 computes in float64.

    A target that is not allowed has logprob -inf (and its token a finite gradient, as torch.log_softmax gives). A token
    with NaN, without allowed entries, or with a target outside 0 to V - 1 gets NaN, also in gradients. Raises
    KernelInputError for invalid inputs.
    """
    _check(hidden, weight, targets, temperature, allowed)
    if allowed is not None:
        allowed = allowed.contiguous()
    logprobs, entropy, _, _ = _loss_head(
        hidden.contiguous(), weight.contiguous(), targets.contiguous(), float(temperature), allowed
    )
    return logprobs, entropy


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, allowed: Tensor | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or not weight.numel():
        raise KernelInputError(
            f"loss head: hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [T, H], [V, H]"
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise KernelInputError(
            f"loss head: hidden ({hidden.dtype}) and weight ({weight.dtype}) must have one float dtype"
        )
    if targets.shape != hidden.shape[:1] or targets.dtype not in (torch.int32, torch.int64):
        raise KernelInputError(
            f"loss head: targets must be int32 or int64 [{hidden.shape[0]}], not {targets.dtype} {list(targets.shape)}"
        )
    if not temperature > 0:
        raise KernelInputError(f"loss head: temperature must be above 0, not {temperature}")
    if allowed is None:
        return
    shapes = ((weight.shape[0],), (hidden.shape[0], weight.shape[0]))
    if allowed.dtype != torch.bool or tuple(allowed.shape) not in shapes:
        raise KernelInputError(
            f"loss head: allowed must be bool {list(shapes[0])} or {list(shapes[1])}, not {allowed.dtype}"
            f" {list(allowed.shape)}"
        )


def _fake(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, allowed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    wide = torch.promote_types(hidden.dtype, torch.float32)
    first, second, third, fourth = (hidden.new_empty(hidden.shape[0], dtype=wide) for _ in range(4))
    return first, second, third, fourth


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    hidden, weight, targets, ctx.temperature, allowed = inputs
    logprobs, entropy, peak, log_mass = output
    ctx.mark_non_differentiable(peak, log_mass)
    ctx.save_for_backward(hidden, weight, targets, allowed, logprobs, entropy, peak, log_mass)


def _gradients(ctx: Any, of_logprob: Tensor, of_entropy: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    hidden, weight, targets, allowed, logprobs, entropy, peak, log_mass = ctx.saved_tensors
    # An invalid target leaves all probabilities valid, but its NaN must still reach the gradients.
    of_logprob = torch.where(logprobs.isnan(), torch.nan, of_logprob)
    of_hidden, of_weight = _backward(
        of_logprob,
        of_entropy.contiguous(),
        hidden,
        weight,
        targets,
        ctx.temperature,
        allowed,
        entropy,
        peak,
        log_mass,
        *ctx.needs_input_grad[:2],
    )
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    return of_hidden if needs_hidden else None, of_weight if needs_weight else None, None, None, None


@operator("loss_head", fake=_fake, save=_save, backward=_gradients)
def _loss_head(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, allowed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    head = Head(hidden, weight, targets, temperature, allowed)
    if choose("loss_head", *head.tensors) == "reference":
        return loss_head_reference(head)
    from triplane_kernels.loss_head_triton import loss_head_triton

    return loss_head_triton(head)


def _backward_fake(*inputs: Any) -> tuple[Tensor, Tensor]:
    _, _, hidden, weight, *_, needs_hidden, needs_weight = inputs
    return _gradient_of(hidden, needs_hidden), _gradient_of(weight, needs_weight)


def _gradient_of(operand: Tensor, needed: bool) -> Tensor:
    """Tensor for an operand's gradient; empty if it is not required."""
    return torch.empty_like(operand) if needed else operand.new_empty(0)


@operator("loss_head_backward", fake=_backward_fake)
def _backward(
    of_logprob: Tensor,
    of_entropy: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    allowed: Tensor | None,
    entropy: Tensor,
    peak: Tensor,
    log_mass: Tensor,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    head = Head(hidden, weight, targets, temperature, allowed)
    sums = Sums(of_logprob, of_entropy, entropy, peak, log_mass)
    into = Gradients(_gradient_of(hidden, needs_hidden), _gradient_of(weight, needs_weight))
    if choose("loss_head_backward", of_logprob, of_entropy, *head.tensors, entropy, peak, log_mass) == "reference":
        loss_head_backward_reference(head, sums, into)
    else:
        from triplane_kernels.loss_head_triton import loss_head_backward_triton

        loss_head_backward_triton(head, sums, into)
    return into.of_hidden, into.of_weight


@workload("loss_head", SHAPES)
def _tune_forward(tokens: int, vocabulary: int, width: int) -> None:
    loss_head(*_drawn(tokens, vocabulary, width))


@workload("loss_head_masked", SHAPES[:1])
def _tune_masked(tokens: int, vocabulary: int, width: int) -> None:
    hidden, weight, targets = _drawn(tokens, vocabulary, width)
    allowed = (torch.rand(tokens, vocabulary, device="cuda") < 0.5).scatter_(1, targets[:, None], True)
    loss_head(hidden.requires_grad_(), weight, targets, allowed=allowed)[0].sum().backward()  # type: ignore[no-untyped-call]


@workload("loss_head_backward", SHAPES)
def _tune_backward(tokens: int, vocabulary: int, width: int) -> None:
    hidden, weight, targets = _drawn(tokens, vocabulary, width)
    logprobs, _ = loss_head(hidden.requires_grad_(), weight, targets)
    logprobs.sum().backward()  # type: ignore[no-untyped-call]


def _drawn(tokens: int, vocabulary: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = (torch.randn(rows, width, dtype=torch.bfloat16, device="cuda") for rows in (tokens, vocabulary))
    return hidden, weight * width**-0.5, torch.randint(vocabulary, (tokens,), device="cuda")
