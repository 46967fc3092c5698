"""Bytes that a forward pass keeps for its backward pass, and bytes that both need in between.

The formulas count what autograd saves in `trainer.model`, line by line; a test compares them with torch's own hooks.
All numbers are float32 except expert numbers and places, which are int64.
"""

from __future__ import annotations

from dataclasses import dataclass

from contracts.architectures import Architecture

F32 = 4
LARGEST_LOGITS = 256 * 2**20
"""`trainer.head.LARGEST_LOGITS`, which a test compares: importing it here would load torch."""
TILES = 2 * 1024 * 4096 * F32
"""Tiles of logits of `triplane_kernels.loss_head_reference`."""


@dataclass(frozen=True)
class Batch:
    """The largest forward pass of a rank."""

    tokens: int
    scored: int
    """Tokens that the loss uses, at most `tokens`."""
    rows: int = 0
    """Sequences of the whole dataset, of the same mean length."""
    sequences: int = 1
    """Sequences of the forward pass."""
    supported: bool = False
    """Whether the dataset records supports. All scored tokens but one are assumed to have one, which takes the most."""

    @property
    def all_tokens(self) -> int:
        """Tokens of the dataset."""
        return self.rows * self.tokens // max(self.sequences, 1)


def attention_bytes(model: Architecture, tokens: int, scored: int) -> int:
    """Saved by the attention of a layer whose result is used for `scored` of `tokens`."""
    query, key = model.heads * model.head_dim, model.kv_heads * model.head_dim
    norm = 3 * model.hidden + 1
    heads = 4 * query + 2 * model.heads + 4 * key + model.kv_heads
    return F32 * (tokens * (norm + heads) + scored * query)


def experts_bytes(model: Architecture, tokens: int) -> int:
    """Saved by the experts of a layer that `tokens` reach, or by its dense MLP."""
    picks, hidden, width = model.experts_per_token, model.hidden, model.width
    if not model.experts:
        return F32 * tokens * (3 * hidden + 1 + 4 * width)
    shares = 2 * picks + (1 + picks if model.normalize_top_k else 0)
    routing = model.experts + shares + 5 * picks
    return F32 * (tokens * (3 * hidden + 1 + routing + picks * (2 * hidden + 4 * width)) + model.experts)


def layer_bytes(model: Architecture, batch: Batch, *, last: bool = False) -> int:
    """Saved by a layer; the last one computes its experts for scored tokens only."""
    reached = batch.scored if last else batch.tokens
    places = 2 * F32 * batch.scored if last else 0
    return attention_bytes(model, batch.tokens, reached) + experts_bytes(model, reached) + places


def saved_bytes(model: Architecture, batch: Batch) -> int:
    """Saved by all layers, the rotary embedding and the last norm; without the output head."""
    layers = (model.layers - 1) * layer_bytes(model, batch) + layer_bytes(model, batch, last=True)
    rotary = 2 * F32 * batch.tokens * model.head_dim
    return layers + rotary + F32 * (2 * batch.tokens + batch.scored * (3 * model.hidden + 1))


def tiled(model: Architecture, batch: Batch, *, cuda: bool) -> bool:
    """Whether the output head keeps no logits: see `trainer.head`."""
    return cuda or batch.scored * model.vocabulary * F32 > LARGEST_LOGITS


def head_bytes(model: Architecture, batch: Batch, *, cuda: bool) -> tuple[int, int, int]:
    """(peak of the output head's forward pass, bytes that it saves, peak of its backward pass).

    The last one has the gradient of the weight, [vocabulary, hidden].
    """
    weight, hidden = F32 * model.vocabulary * model.hidden, F32 * batch.scored * model.hidden
    logits = F32 * batch.scored * model.vocabulary
    if tiled(model, batch, cuda=cuda):
        peak, kept, back = TILES, 4 * F32 * batch.scored, TILES + weight + hidden
    else:
        peak, kept, back = 4 * logits, logits, max(3 * logits, logits + weight + hidden)
    if not batch.supported:
        return peak, kept, back
    part = min(logits, LARGEST_LOGITS)
    masks, wide = part // F32, 0 if cuda else part
    own = hidden + (masks + wide if part == logits else 0)
    return max(masks + 4 * wide, own + peak), own + kept, max(own + back, masks + 4 * wide + weight + hidden)


def experts_transient(model: Architecture, tokens: int) -> int:
    """Bytes that the forward pass of a layer's experts needs beyond those that it saves."""
    return 2 * F32 * tokens * model.experts_per_token * model.hidden


def experts_backward(model: Architecture, tokens: int) -> int:
    """Most bytes that the backward pass of a layer's MLP needs, beyond those saved that are still held.

    Gradients of gate and up, of their sum of inputs, and of one stack of matrices.
    """
    slots = F32 * tokens * (model.experts_per_token or 1)
    stack = F32 * (model.experts or 1) * model.hidden * model.width
    return F32 * tokens * model.hidden + slots * max(2 * model.hidden, 2 * model.width + model.hidden) + stack
