"""The top-k router of a mixture of experts: logits [T, E] -> each token's k experts and their weights."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from triplane_kernels.custom_ops import operator
from triplane_kernels.errors import KernelInputError
from triplane_kernels.machine import choose
from triplane_kernels.router_reference import route_backward_reference, route_reference
from triplane_kernels.tuning import workload

MOST_EXPERTS = 4096
SHAPES = [(tokens, experts, 8) for tokens in (4096, 32768, 131072) for experts in (128, 256)]


def route(
    logits: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    scores: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True,
) -> tuple[Tensor, Tensor]:
    """Choose every token's k experts.

    logits: [T, E] float32, bfloat16 or float16. bias: float32 [E], added to the scores for the choice only, never to
    the weights (auxiliary-loss-free balancing: DeepSeek-V3, section 2.1.2, arXiv:2412.19437); it gets no gradient.
    scores: over all experts (softmax) or per expert (sigmoid). normalize: divide a token's k weights by their sum.
    Returns weights float32 [T, k], differentiable in logits, and experts int32 [T, k], highest score first, equal ones
    by lower index. Experts are always valid indices; NaN logits give NaN weights. Float64 logits are computed in
    float64. Raises KernelInputError for options and shapes that don't fit.
    """
    if logits.dim() != 2 or not 1 <= k <= logits.shape[1] <= MOST_EXPERTS:
        raise KernelInputError(
            f"route: needs logits [T, E] with 1 <= k <= E <= {MOST_EXPERTS}, not k {k} and logits {list(logits.shape)}"
        )
    if scores not in ("softmax", "sigmoid"):
        raise KernelInputError(f"route: no scores {scores!r}; use softmax or sigmoid")
    if bias is not None:
        if bias.shape != logits.shape[1:]:
            raise KernelInputError(
                f"route: bias must be [E], one for each of {logits.shape[1]} experts, not {list(bias.shape)}"
            )
        bias = bias.detach().to(_wide(logits)).contiguous()
    return _route(logits.contiguous(), k, bias, scores, normalize)


def _wide(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _route_fake(logits: Tensor, k: int, bias: Tensor | None, scores: str, normalize: bool) -> tuple[Tensor, Tensor]:
    tokens = logits.shape[0]
    return logits.new_empty(tokens, k, dtype=_wide(logits)), logits.new_empty(tokens, k, dtype=torch.int32)


def _route_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, _, ctx.scores, ctx.normalize = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(logits, output[1])


def _route_gradients(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None, None, None, None]:
    logits, experts = ctx.saved_tensors
    return _route_backward(gradient.contiguous(), logits, experts, ctx.scores, ctx.normalize), None, None, None, None


@operator("route", fake=_route_fake, save=_route_save, backward=_route_gradients)
def _route(logits: Tensor, k: int, bias: Tensor | None, scores: str, normalize: bool) -> tuple[Tensor, Tensor]:
    if choose("route", logits, *(() if bias is None else (bias,))) == "reference":
        return route_reference(logits, k, bias, scores, normalize)
    from triplane_kernels.router_triton import route_triton

    return route_triton(logits, k, bias, scores, normalize)


def _route_backward_fake(gradient: Tensor, logits: Tensor, experts: Tensor, scores: str, normalize: bool) -> Tensor:
    return torch.empty_like(logits)


@operator("route_backward", fake=_route_backward_fake)
def _route_backward(gradient: Tensor, logits: Tensor, experts: Tensor, scores: str, normalize: bool) -> Tensor:
    if choose("route_backward", gradient, logits, experts) == "reference":
        return route_backward_reference(gradient, logits, experts, scores, normalize)
    from triplane_kernels.router_triton import route_backward_triton

    return route_backward_triton(gradient, logits, experts, scores, normalize)


@workload("route", SHAPES)
def _tune(tokens: int, num_experts: int, k: int) -> None:
    route(torch.randn(tokens, num_experts, device="cuda"), k)


@workload("route_backward", SHAPES)
def _tune_backward(tokens: int, num_experts: int, k: int) -> None:
    weights, _ = route(torch.randn(tokens, num_experts, device="cuda", requires_grad=True), k)
    weights.sum().backward()  # type: ignore[no-untyped-call]
