"""Registration of kernels as torch operators `torch.ops.triplane.<name>`, so that torch.compile, FSDP2 and autograd
treat them as torch's own.

    @operator("scale", fake=_fake, save=_save, backward=_backward)
    def scale(x: Tensor, factor: float) -> Tensor: ...

What `torch.library.custom_op` does, through the same registries, without importing the compiler (seconds) at the first
call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
    mutates: Sequence[str] = (),
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register the decorated function as `torch.ops.triplane.<name>` and return that operator, called as the function
    is.

    The function's annotations give the schema: Tensor, Tensor | None, int, float, bool, str, list[int], optional or
    not, and as result Tensor or a tuple of them; parameters are positional, and keywords may name them. It gets tensors
    on any device, runs below autograd, and must return new tensors: a result never is or views an argument or another
    result, even when there is nothing to do.

    fake: called as the function is, on tensors without data: returns empty tensors of the right shape, dtype and
    device, and reads no values. save: `save(ctx, inputs, output)`, called when a gradient will be wanted: keeps what
    `backward` needs by `ctx.save_for_backward`. backward: `backward(ctx, *gradients)`, a gradient a result (None where
    the result was not used), returns one gradient a parameter. Made of torch's own and registered operators only, so
    that it can be traced. Without it, a gradient asked for raises RuntimeError instead of vanishing. mutates: names of
    parameters that are written to.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        qualified = f"{NAMESPACE}::{name}"
        schema = torch.library.infer_schema(function, mutates_args=tuple(mutates))
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
        _LIBRARY.impl(name, _on_the_tensors_device(function), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(qualified, fake, lib=_LIBRARY)
        torch.library.register_autograd(
            qualified, backward or _no_gradient(qualified), setup_context=save, lib=_LIBRARY
        )
        overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        return cast("Callable[P, R]", overload)

    return register


def _on_the_tensors_device(function: Callable[P, R]) -> Callable[P, R]:
    """`function` with the device of its first CUDA tensor as the current one: Triton launches on the current device,
    whatever its pointers are.
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
