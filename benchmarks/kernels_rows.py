"""Cases bound by memory: quantizers, token permutation, SwiGLU, norms, the router.

A rate is the number of bytes to move, divided by time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from triplane_kernels.norm import rms_norm
from triplane_kernels.permute import Permuted, permute, unpermute
from triplane_kernels.quantize import (
    dequantize_activations,
    dequantize_mx,
    dequantize_weights,
    quantize_activations,
    quantize_both,
    quantize_mx,
    quantize_weights,
    quantize_weights_both,
)
from triplane_kernels.router import route
from triplane_kernels.swiglu import swiglu, swiglu_backward, swiglu_quantized

from benchmarks.kernels_case import Case, Sizes, normal, relative_error, size_of

QUANTIZED = 0.04
"""Accepted error; FP8 blocks of normal data have 2.6%."""
ROUNDED = 0.01
QUANTIZERS, PERMUTE = "quantizers_tb_per_s", "permute_tb_per_s"
EPS = 1e-6
SAMPLE = 256
"""Number of compared rows."""


def quantizers(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Each quantizer, on one large matrix."""
    rows, columns = sizes.matrix
    x = normal(rows, columns, device=device)
    shape = f"{rows}x{columns} bfloat16"
    kinds: dict[str, tuple[Callable[[], tuple[Tensor, ...]], Callable[[Tensor, Tensor], Tensor]]] = {
        "quantize 1x128": (lambda: quantize_activations(x), dequantize_activations),
        "quantize 1x128, powers of two": (lambda: quantize_activations(x, power_of_two=True), dequantize_activations),
        "quantize 1x128, both ways": (lambda: quantize_both(x), dequantize_activations),
        "quantize 128x128": (lambda: quantize_weights(x), dequantize_weights),
        "quantize 128x128, both ways": (lambda: quantize_weights_both(x), dequantize_weights),
        "quantize MXFP8 1x32": (lambda: quantize_mx(x), dequantize_mx),
    }
    for name, (work, dequantize) in kinds.items():
        error = _quantized(work, dequantize, x)
        yield Case(name, shape, work, _moved(work, x), "TB/s", error, QUANTIZED, QUANTIZERS)


def _quantized(
    work: Callable[[], tuple[Tensor, ...]], dequantize: Callable[[Tensor, Tensor], Tensor], x: Tensor
) -> Callable[[], float]:
    def error() -> float:
        codes, scales = work()[:2]
        return relative_error(dequantize(codes, scales)[:SAMPLE], x[:SAMPLE])

    return error


def _moved(work: Callable[[], tuple[Tensor, ...]], x: Tensor) -> Callable[[], float]:
    return lambda: size_of(x, *work())


def permutation(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """Tokens to their experts and back."""
    x = normal(sizes.tokens, sizes.hidden, device=device)
    experts = torch.rand(sizes.tokens, sizes.experts, device=device).topk(sizes.picks).indices
    shares = torch.rand(sizes.tokens, sizes.picks, device=device)
    done = permute(x, experts.int(), sizes.experts)
    shape = f"{sizes.tokens} tokens of {sizes.hidden}, {sizes.picks} of {sizes.experts} experts"

    def permuted() -> Permuted:
        return permute(x, experts.int(), sizes.experts)

    def lost() -> float:
        found = permuted()
        return relative_error(found.rows[found.position.long()[:SAMPLE]], x[:SAMPLE, None].expand(-1, sizes.picks, -1))

    moved = size_of(x, experts.int(), done.rows, done.source, done.position)
    yield Case(
        "permute", shape, permuted, moved, "TB/s", lost, 0.0, PERMUTE, peers={"torch index": lambda: _indexed(x, done)}
    )

    def error() -> float:
        rows = done.rows[done.position.long()[:SAMPLE]].float()
        return relative_error(unpermute(done.rows, done, shares)[:SAMPLE], (rows * shares[:SAMPLE, :, None]).sum(1))

    moved = size_of(x, shares, done.position) + sizes.tokens * sizes.picks * sizes.hidden * x.element_size()
    yield Case("unpermute", shape, lambda: unpermute(done.rows, done, shares), moved, "TB/s", error, ROUNDED, PERMUTE)


def _indexed(x: Tensor, done: Permuted) -> Callable[[], Tensor]:
    tokens = (done.source.clamp(min=0) // done.position.shape[1]).long()
    return lambda: x[tokens]


def activation(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """SwiGLU, alone and fused with its quantization."""
    rows, width = sizes.tokens * sizes.picks, sizes.width
    gate_up, gradient = normal(rows, 2 * width, device=device), normal(rows, width, device=device)
    shape = f"{rows}x{2 * width} bfloat16"

    def wanted() -> Tensor:
        gate, up = gate_up[:SAMPLE].float().chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up

    def wanted_gradient() -> Tensor:
        sample = gate_up[:SAMPLE].float().requires_grad_()
        gate, up = sample.chunk(2, dim=1)
        (found,) = torch.autograd.grad(torch.nn.functional.silu(gate) * up, sample, gradient[:SAMPLE].float())
        return found

    yield Case(
        "SwiGLU",
        shape,
        lambda: swiglu(gate_up),
        size_of(gate_up, gradient),
        "TB/s",
        lambda: relative_error(swiglu(gate_up)[:SAMPLE], wanted()),
        ROUNDED,
    )
    yield Case(
        "SwiGLU, quantize",
        shape,
        lambda: swiglu_quantized(gate_up),
        lambda: size_of(gate_up, *swiglu_quantized(gate_up)),
        "TB/s",
        lambda: relative_error(dequantize_activations(*swiglu_quantized(gate_up))[:SAMPLE], wanted()),
        QUANTIZED,
    )
    yield Case(
        "SwiGLU backward",
        shape,
        lambda: swiglu_backward(gradient, gate_up),
        size_of(gradient, gate_up, gate_up),
        "TB/s",
        lambda: relative_error(swiglu_backward(gradient, gate_up)[:SAMPLE], wanted_gradient()),
        ROUNDED,
    )


def norms(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """The norm of hidden states, forward and backward."""
    x = normal(sizes.tokens, sizes.hidden, device=device).requires_grad_()
    gradient = normal(sizes.tokens, sizes.hidden, device=device)
    weight = torch.ones(sizes.hidden, device=device, requires_grad=True)
    shape = f"{sizes.tokens}x{sizes.hidden} bfloat16"
    out = rms_norm(x, weight, EPS)

    def by_torch(rows: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(rows.float(), rows.shape[-1:], weight, EPS)

    def backward() -> Tensor:
        found: Tensor = torch.autograd.grad(out, x, gradient, retain_graph=True)[0]
        return found

    def wrong_backward() -> float:
        return relative_error(backward()[:SAMPLE], wanted())

    def wanted() -> Tensor:
        sample = x.detach()[:SAMPLE].float().requires_grad_()
        found: Tensor = torch.autograd.grad(by_torch(sample), sample, gradient[:SAMPLE].float())[0]
        return found

    yield Case(
        "norm",
        shape,
        lambda: rms_norm(x, weight, EPS),
        size_of(x, gradient),
        "TB/s",
        lambda: relative_error(out[:SAMPLE], by_torch(x[:SAMPLE])),
        ROUNDED,
        peers={"torch with casts": lambda: lambda: by_torch(x).to(x.dtype)},
    )
    moved = size_of(x, gradient, gradient)
    yield Case("norm backward", shape, backward, moved, "TB/s", wrong_backward, ROUNDED)


def router(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """The choice of experts."""
    logits = torch.randn(sizes.tokens, sizes.experts, device=device)
    wanted = logits.softmax(-1).topk(sizes.picks).values
    wanted = wanted / wanted.sum(-1, keepdim=True)
    yield Case(
        "route",
        f"{sizes.tokens} tokens, {sizes.picks} of {sizes.experts} experts",
        lambda: route(logits, sizes.picks),
        lambda: size_of(logits, *route(logits, sizes.picks)),
        "TB/s",
        lambda: relative_error(route(logits, sizes.picks)[0], wanted),
        ROUNDED,
        peers={"torch softmax, topk": lambda: lambda: logits.softmax(-1).topk(sizes.picks)},
    )
