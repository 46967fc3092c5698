"""Allocations of the default backend: every rank holds the whole model (`trainer.rl`, `trainer.parameters`)."""

from __future__ import annotations

from trainer.plan.activations import (
    F32,
    Batch,
    experts_backward,
    experts_transient,
    head_bytes,
    layer_bytes,
    saved_bytes,
)
from trainer.plan.shapes import Group, Shapes
from trainer.plan.tape import Tape

QUANTIZING, DEQUANTIZING = 12, 8
"""Bytes an element of a buffer beside its codes: a padded copy, its quotient by the scales, and the clamped quotient;
codes as float32 and their products.
"""
IN_MEMORY = 64 << 20
"""`trainer.flat.IN_MEMORY`, which a test compares: importing it here would load torch."""
ROW = 500
"""Bytes a row: its place in the flat arrays, names, reward and group."""
READ_ROWS, READ_TOKEN = 256, 40
"""Rows that are read at once, and bytes that each of their tokens takes meanwhile."""


def plan_torch(shapes: Shapes, batch: Batch, *, moments: int, resumed: bool, cuda: bool) -> Tape:
    """moments: AdamW's numbers for each parameter; resumed: whether the trainer state has them."""
    tape = Tape(cuda=cuda)
    tape.enter("load")
    read_checkpoint(tape, shapes)
    tape.hold("trainer state as read", F32 * shapes.parameters * (1 + (moments if resumed else 0)))
    hold_parameters(tape, shapes)
    tape.drop("loaded checkpoint")
    tape.hold("optimizer moments", F32 * moments * shapes.parameters)
    hold_data(tape, batch, numbers=2)
    tape.enter("score")
    forward(tape, shapes, batch, cuda=cuda)
    tape.enter("backward")
    backward(tape, shapes, batch, cuda=cuda)
    tape.enter("step")
    step(tape, shapes)
    tape.enter("publish")
    return tape


def plan_warm_start(shapes: Shapes, batch: Batch, *, cuda: bool = False) -> Tape:
    """Supervised training from fresh weights: Muon for quantized matrices, AdamW for the rest.

    Muon's temporaries are not counted.
    """
    tape = Tape(cuda=cuda)
    tape.enter("load")
    tape.hold("drawn weights", F32 * shapes.parameters)
    hold_parameters(tape, shapes)
    tape.drop("drawn weights")
    tape.hold("optimizer moments", F32 * (2 * shapes.parameters - shapes.quantized))
    hold_data(tape, batch)
    tape.enter("backward")
    backward(tape, shapes, batch, cuda=cuda)
    tape.enter("step")
    step(tape, shapes)
    return tape


def read_checkpoint(tape: Tape, shapes: Shapes) -> None:
    """Parameters of the checkpoint, which stay until the masters are compared with them."""
    files = F32 * shapes.parameters + shapes.quantized + F32 * shapes.scales
    tape.hold("checkpoint as read", files)
    hold_parameters(tape, shapes, into="loaded checkpoint")
    tape.touch("quantization", DEQUANTIZING * shapes.widest)
    tape.drop("checkpoint as read")


def hold_parameters(tape: Tape, shapes: Shapes, into: str | None = None) -> None:
    """Buffers of `trainer.parameters.Parameters`. into: one kind for all of them."""
    for group in shapes.groups:
        tape.hold(into or "masters", F32 * group.elements)
        if group.scales:
            quantize(tape, group)
            tape.hold(into or "codes", group.elements)
            tape.hold(into or "scales", F32 * group.scales)
        tape.hold(into or "gradients", F32 * group.elements)
    for group in shapes.groups:
        if group.scales:  # the pages of the leaves come with their first values
            quantize(tape, group)
            tape.hold(into or "leaves", F32 * group.elements)
            dequantize(tape, group)


def quantize(tape: Tape, group: Group) -> None:
    """Buffers between masters and new codes."""
    tape.touch("quantization", (QUANTIZING + 1) * group.elements + F32 * group.scales)


def dequantize(tape: Tape, group: Group) -> None:
    """Old codes and buffers between new codes and leaves."""
    tape.touch("quantization", (DEQUANTIZING + 1) * group.elements)


def requantize(tape: Tape, shapes: Shapes) -> None:
    """New codes beside the old ones, then new leaves."""
    for group in shapes.groups:
        if group.scales:
            quantize(tape, group)
            dequantize(tape, group)


def hold_data(tape: Tape, batch: Batch, numbers: int = 0) -> None:
    """The dataset in the flat arrays of `trainer.flat`. Large ones lie in files, whose pages the kernel writes back.

    numbers: float32 arrays for the scored tokens: the log probabilities of the sampler, and under the starting weights.
    """
    tokens = batch.all_tokens
    scored = tokens * batch.scored // max(batch.tokens, 1)
    arrays = [4 * tokens, tokens, *[F32 * scored] * numbers]
    tape.hold("data", ROW * batch.rows + sum(size for size in arrays if size <= IN_MEMORY))
    tape.touch("data", READ_TOKEN * tokens * min(1, READ_ROWS / max(batch.rows, 1)))


def forward(tape: Tape, shapes: Shapes, batch: Batch, *, cuda: bool) -> None:
    """A pass without gradients: one layer's temporaries, or the output head's."""
    model = shapes.model
    states = F32 * batch.tokens * (2 * model.hidden + 2 * model.head_dim)
    slots = F32 * batch.tokens * (model.experts_per_token or 1)
    experts = slots * (4 * model.hidden + 2 * model.width)
    head, _, _ = head_bytes(model, batch, cuda=cuda)
    with tape.brief("activations", states):
        tape.touch("activations", experts)
        tape.touch("logits", head)


def backward(tape: Tape, shapes: Shapes, batch: Batch, *, cuda: bool) -> None:
    """A microbatch: activations of all layers, the output head, then gradients from the last layer to the first."""
    model = shapes.model
    saved = saved_bytes(model, batch)
    head, kept, head_back = head_bytes(model, batch, cuda=cuda)
    last = layer_bytes(model, batch, last=True)
    with tape.brief("activations", saved):
        with tape.brief("activations", F32 * batch.tokens * model.hidden):
            tape.touch("logits", head)
        tape.touch("logits", max(kept, head_back))
        waiting = F32 * model.vocabulary * model.hidden if model.tied else 0
        with tape.brief("gradients in flight", waiting + experts_backward(model, batch.scored)):
            pass
    if model.layers > 1:
        with tape.brief("activations", saved - last):
            tape.touch("activations", experts_transient(model, batch.tokens))
            tape.touch("gradients in flight", waiting + experts_backward(model, batch.tokens))
    tape.touch("gradients in flight", waiting + F32 * model.vocabulary * model.hidden)


def step(tape: Tape, shapes: Shapes) -> None:
    """AdamW's denominator of the largest buffer, then new codes and leaves."""
    tape.touch("optimizer temporaries", F32 * shapes.broadest)
    requantize(tape, shapes)
