"""Registration of kernels as torch operators `torch.ops.triplane.<name>` for torch.compile, FSDP2 and autograd.

    @operator("scale", fake=_fake, save=_save, backward=_backward)
    def scale(x: Tensor, factor: float) -> Tensor: ...

Equals `torch.library.custom_op`, through the same registries, but does not import the compiler (seconds) at the first
call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

NAMESPACE = "triplane"
P = ParamSpec("P")
R = TypeVar("R")
Gradients = Tensor | None | tuple[Tensor | None, ...]

_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def operator(
    name: str,
    *,
    fake: Callable[..., R],
    save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
    backward: Callable[..., Gradients] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated function as `torch.ops.triplane.<name>` and return that operator, with the same call
    signature.

    The function's annotations give the schema: Tensor, Tensor | None, int, float, bool, str, list[int], optional or
    not, and as result Tensor or a tuple of them; parameters are positional, and keywords may name them. The function
    gets tensors on any device, runs below autograd, and must return new tensors: a result must never be or view an
    argument or another result, even if there is nothing to compute.

    fake: has the same signature and gets tensors without data; returns empty tensors of the right shape, dtype and
    device, and reads no values. save: `save(ctx, inputs, output)`, called if a gradient is required; stores the inputs
    of `backward` by `ctx.save_for_backward`. backward: `backward(ctx, *gradients)`, with one gradient per result (None
    for an unused result), returns one gradient per parameter. It may only use torch's and registered operators, so that
    it can be traced. Without it, requesting a gradient raises RuntimeError.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        qualified = f"{NAMESPACE}::{name}"
        schema = torch.library.infer_schema(function, mutates_args=())
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, on_the_tensors_device(function), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(qualified, fake, lib=_LIBRARY)
        torch.library.register_autograd(
            qualified, backward or _no_gradient(qualified), setup_context=save, lib=_LIBRARY
        )
        overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        return cast("Callable[P, R]", overload)

    return register


def on_the_tensors_device(function: Callable[P, R]) -> Callable[P, R]:
    """`function` with its first CUDA tensor's device as the current one, since Triton always launches on the current
    device.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        on_cuda = (value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_cuda)
        device = next(on_cuda, None)
        if device is None or device.index == torch.cuda.current_device():
            return function(*args, **kwargs)
        with torch.cuda.device(device):
            return function(*args, **kwargs)

    return call


def _no_gradient(qualified: str) -> Callable[..., Gradients]:
    def backward(ctx: Any, *gradients: Tensor | None) -> Gradients:
        raise RuntimeError(f"{qualified} has no gradient: detach its inputs, or call the operator that wraps it")

    return backward
