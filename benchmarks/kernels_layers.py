"""Cases of several kernels: the loss head, in milliseconds and memory, and the expert layer, compared with bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triplane_kernels.loss_head import loss_head
from triplane_kernels.moe import BF16, Recipe, expert_layer
from triplane_kernels.moe_weights import ExpertWeights

from benchmarks.kernels_case import Measured, Sizes, normal, relative_error
from benchmarks.kernels_clock import Clock

ROUNDED = 0.02
LAYER = 0.08
"""Accepted error of two consecutive FP8 products on quantized weights."""
SAMPLE = 64
Row = dict[str, Any]


def loss_head_rows(sizes: Sizes, clock: Clock) -> Iterator[Measured]:
    """Forward, and forward and backward, of log-probability and entropy, compared with a materialized logits matrix."""
    device = clock.device
    hidden = normal(sizes.head_tokens, sizes.head_hidden, device=device).requires_grad_()
    weight = (normal(sizes.vocabulary, sizes.head_hidden, device=device) * sizes.head_hidden**-0.5).requires_grad_()
    targets = torch.randint(sizes.vocabulary, (sizes.head_tokens,), device=device)
    shape = f"{sizes.head_tokens} tokens of {sizes.head_hidden}, vocabulary {sizes.vocabulary}"

    def forward(head: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[], object]:
        def work() -> object:
            with torch.no_grad():
                return head(hidden, weight, targets)

        return work

    def both(head: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[], object]:
        def work() -> object:
            logprobs, entropy = head(hidden, weight, targets)
            return torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))

        return work

    def error() -> float:
        with torch.no_grad():
            found, wanted = (
                loss_head(hidden, weight, targets),
                _materialized(hidden[:SAMPLE].float(), weight.float(), targets[:SAMPLE]),
            )
        return max(relative_error(part[:SAMPLE], right) for part, right in zip(found, wanted, strict=True))

    wrong = error()
    for name, make in (("forward", forward), ("forward and backward", both)):
        seconds, peak = clock.seconds(make(loss_head)), clock.peak_bytes(make(loss_head)) / 2**30
        beside, notes = "", []
        try:
            naive, naive_peak = clock.seconds(make(_materialized)), clock.peak_bytes(make(_materialized)) / 2**30
            beside = f"materialized {naive * 1e3:.3g} ms, {naive_peak:.3g} GiB"
        except RuntimeError as refused:
            notes = [f"loss head, {name}: materialized does not run here: {str(refused).splitlines()[0][:120]}"]
        yield Measured(
            _row(f"loss head, {name}", shape, seconds, f"{peak:.3g} GiB", wrong, ROUNDED, beside),
            {f"loss_head_{name.replace(' ', '_')}_ms": seconds * 1e3, "loss_head_peak_gib": peak},
            best=True,
            notes=notes,
        )


def _materialized(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    every = F.linear(hidden, weight).float().log_softmax(-1)
    return every.gather(1, targets[:, None]).squeeze(1), -(every.exp() * every).sum(-1)


def expert_layer_rows(sizes: Sizes, clock: Clock) -> Iterator[Measured]:
    """Forward and backward of the layer with and without FP8 products; weights are quantized beforehand, as once per
    optimizer step.

    The speedup is over the faster of two twins in bfloat16: the same layer without FP8, and torch's grouped products.
    """
    device = clock.device
    hidden = normal(sizes.tokens, sizes.hidden, device=device).requires_grad_()
    logits = torch.randn(sizes.tokens, sizes.experts, device=device, requires_grad=True)
    gate, up, down = masters = [
        (normal(sizes.experts, *shape, device=device) * shape[1] ** -0.5).requires_grad_()
        for shape in ((sizes.width, sizes.hidden), (sizes.width, sizes.hidden), (sizes.hidden, sizes.width))
    ]
    gradient = normal(sizes.tokens, sizes.hidden, device=device)
    quantized, full = ExpertWeights.quantize(gate, up, down), ExpertWeights.full(gate, up, down, torch.bfloat16)
    shape = f"{sizes.tokens} tokens of {sizes.hidden}, {sizes.picks} of {sizes.experts} experts of {sizes.width}"
    layers: dict[str, Callable[[], Tensor]] = {
        "bfloat16": lambda: expert_layer(hidden, logits, full, sizes.picks, recipe=BF16),
        "bfloat16, torch grouped_mm": lambda: _torch_layer(hidden, logits, masters, sizes.picks),
        "FP8, wgrad bfloat16": lambda: expert_layer(hidden, logits, quantized, sizes.picks),
        "FP8, wgrad FP8": lambda: expert_layer(hidden, logits, quantized, sizes.picks, recipe=Recipe(wgrad=True)),
    }

    def step(layer: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(layer(), (hidden, logits, *masters), gradient)

    with torch.no_grad():
        right = layers["bfloat16"]()
    times: dict[str, float] = {}
    for name, layer in layers.items():
        try:
            with torch.no_grad():
                off = relative_error(layer(), right)
            times[name] = seconds = clock.seconds(step(layer))
        except Exception as failure:  # noqa: BLE001  a layer that the device refuses is a row, not the end
            yield Measured.failed(f"expert layer, {name}", shape, failure)
            continue
        twin = min(known for key, known in times.items() if key.startswith("bfloat16"))
        speedup = twin / seconds
        metrics = {"expert_layer_speedup": speedup} if name.startswith("FP8") else {}
        row = _row(f"expert layer, {name}", shape, seconds, f"{speedup:.3g}x", off, LAYER, "")
        yield Measured(row, metrics, best=True)


def _torch_layer(hidden: Tensor, logits: Tensor, masters: list[Tensor], picks: int) -> Tensor:
    """The layer in torch alone: sorted tokens, `grouped_mm`."""
    gate, up, down = masters
    shares, experts = logits.softmax(-1).topk(picks, dim=-1)
    shares = (shares / shares.sum(-1, keepdim=True)).to(hidden.dtype)
    slots = experts.reshape(-1)
    order = slots.argsort(stable=True)
    ends = torch.bincount(slots, minlength=gate.shape[0]).cumsum(0).int()
    rows = hidden[order // picks]
    inner = F.silu(F.grouped_mm(rows, gate.mT, offs=ends)) * F.grouped_mm(rows, up.mT, offs=ends)
    out = F.grouped_mm(inner, down.mT, offs=ends)[order.argsort()]
    return (out.view(*experts.shape, -1) * shares[..., None]).sum(1)


def _row(name: str, shape: str, seconds: float, rate: str, error: float, bound: float, beside: str) -> Row:
    return {
        "kernel": name,
        "shape": shape,
        "ms": seconds * 1e3,
        "rate": rate,
        "of ceiling": "",
        "error": error,
        "right": bool(error <= bound),
        "beside": beside,
    }
