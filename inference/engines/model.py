"""Forward pass of Qwen3-MoE for sampling: plain torch, float32, with bits that do not depend on the batch.

    tokens [T] -> embedding -> layers x (norm, attention over the cache, norm, routed experts) -> hidden [T, hidden] ->
    logits

A row's bits are the same in every batch, and in prefill and decode, since every product has a row count padded to a
multiple of 16 (4 in attention), the cached length is padded to a multiple of 8 (at least 16), one product computes the
softmax's sum and values, and experts get only their own rows, padded likewise. Reference: transformers'
Qwen3MoeForCausalLM.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from contracts.qwen3_moe import Architecture
from inference.engines.kv import ROW, KvCache, round_up
from inference.engines.weights import LayerWeights, Weights

TOKEN_ROWS = 16
"""Rows of a product with weights are padded to a multiple of this: some processors sum 8 rows in another order if there
are more than 128 products.
"""
QUERY_ROWS = 4
PIECE = 128
"""Maximum cached positions that one product in attention contracts."""
SHORTEST = 16
"""Minimum cached positions that attention reads: a product 8 columns wide takes another code path, with other bits."""
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """New tokens of the sequences in slots [first, first + rows), flattened in slot order."""

    first: int
    rows: int
    width: int
    """Query rows per sequence in attention: the largest count, rounded up to QUERY_ROWS."""
    length: int
    """Cached positions that attention reads, rounded up to ROW, at least SHORTEST."""
    tokens: Tensor
    """[T padded to TOKEN_ROWS] int64"""
    positions: Tensor
    """[T padded] int64, absolute"""
    slots: Tensor
    """[T] int64"""
    cells: Tensor
    """[T] int64: each token's place in the [rows * width] rectangle"""
    unseen: Tensor
    """[rows, 1, width, length] bool: positions masked for a query"""
    ends: Integers
    """[rows]: one past each sequence's last token in the flat order"""


def make_batch(first: int, tokens: list[Integers], starts: Integers) -> Batch:
    """Batch of `tokens[i]`, which begin at position `starts[i]` of the sequence in slot `first + i`."""
    counts = np.fromiter((len(part) for part in tokens), np.int64, len(tokens))
    ends = np.cumsum(counts)
    total, width = int(ends[-1]), round_up(int(counts.max()), QUERY_ROWS)
    length = max(SHORTEST, round_up(int((starts + counts).max()), ROW))
    row = np.repeat(np.arange(len(tokens)), counts)
    column = np.arange(total) - np.repeat(ends - counts, counts)
    padded = np.zeros((2, round_up(total, TOKEN_ROWS)), np.int64)
    padded[0, :total] = np.concatenate(tokens)
    padded[1, :total] = starts[row] + column
    seen = torch.from_numpy(np.minimum(starts[:, None] + np.arange(width), (starts + counts - 1)[:, None]))
    unseen = torch.arange(length) > seen[:, None, :, None]
    flat = torch.from_numpy(padded)
    return Batch(
        first,
        len(tokens),
        width,
        length,
        flat[0],
        flat[1],
        torch.from_numpy(first + row),
        torch.from_numpy(row * width + column),
        unseen,
        ends,
    )


class Rotary:
    """Tables of the rotary embedding, grown on demand.

    The sine's first half is negated, so rotation is `x * cos + roll(x) * sin`.
    """

    def __init__(self, shape: Architecture) -> None:
        self._inverse = 1.0 / (shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim))
        self._cos = self._sin = torch.empty(0, 1, shape.head_dim)

    def tables(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, 1, head_dim] of the batch's positions."""
        if batch.length > len(self._cos):
            angles = torch.arange(2 * batch.length).float()[:, None] * self._inverse
            self._cos = torch.cat((angles.cos(), angles.cos()), -1)[:, None]
            self._sin = torch.cat((-angles.sin(), angles.sin()), -1)[:, None]
        return self._cos[batch.positions], self._sin[batch.positions]


def forward(
    weights: Weights, cache: KvCache, rotary: Rotary, batch: Batch, routes: list[Tensor] | None = None
) -> Tensor:
    """Run the batch, writing its keys and values to the cache. Returns normalized hidden states [T padded, hidden].

    routes: output list for each layer's chosen experts, [T padded, experts_per_token].
    """
    shape = weights.architecture
    cos, sin = rotary.tables(batch)
    x = weights.embedding[batch.tokens]
    for index, layer in enumerate(weights.layers):
        x = x + _attention(shape, layer, cache, index, batch, cos, sin, _norm(x, layer.input_norm, shape))
        x = x + _experts(shape, layer, _norm(x, layer.post_norm, shape), routes)
    return _norm(x, weights.norm, shape)


def logits_of(weights: Weights, hidden: Tensor) -> Tensor:
    """Logits [N, vocabulary] of hidden rows [N, hidden], computed over a padded row count."""
    rows = hidden.shape[0]
    padded = F.pad(hidden, (0, 0, 0, -rows % TOKEN_ROWS))
    return F.linear(padded, weights.head)[:rows]


def _norm(x: Tensor, weight: Tensor, shape: Architecture) -> Tensor:
    return F.rms_norm(x, (shape.hidden,), weight, shape.epsilon)


def _attention(
    shape: Architecture,
    layer: LayerWeights,
    cache: KvCache,
    index: int,
    batch: Batch,
    cos: Tensor,
    sin: Tensor,
    x: Tensor,
) -> Tensor:
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    count = len(batch.cells)
    mixed = F.linear(x, layer.qkv).view(-1, heads + 2 * kv_heads, dim)
    qk = F.rms_norm(mixed[:, : heads + kv_heads], (dim,), None, shape.epsilon) * layer.qk_norm
    qk = qk * cos + qk.roll(dim // 2, -1) * sin
    keys, values = cache.keys[index], cache.values[index]
    keys[batch.slots, :, batch.positions[:count]] = qk[:count, heads:]
    values[batch.slots, :, batch.positions[:count], :dim] = mixed[:count, heads + kv_heads :]

    groups, rows, length = heads // kv_heads, batch.rows, batch.length
    query = x.new_zeros(rows * batch.width, heads, dim)
    query[batch.cells] = qk[:count, :heads] * dim**-0.5
    query = (
        query.view(rows, batch.width, heads, dim).transpose(1, 2).reshape(rows * kv_heads, groups * batch.width, dim)
    )
    slots = slice(batch.first, batch.first + rows)
    k, v = keys[slots, :, :length].flatten(0, 1), values[slots, :, :length].flatten(0, 1)
    scores = torch.bmm(query, k.transpose(1, 2)).view(rows, heads, batch.width, length)
    scores.masked_fill_(batch.unseen, -torch.inf)
    scores -= scores.amax(-1, keepdim=True)
    summed = _weighted_sum(scores.exp_().view(rows * kv_heads, groups * batch.width, length), v)
    mean = (summed[..., :dim] / summed[..., dim : dim + 1]).view(rows, heads, batch.width, dim).transpose(1, 2)
    out = x.new_zeros(x.shape[0], heads * dim)
    out[:count] = mean.reshape(rows * batch.width, heads * dim)[batch.cells]
    return F.linear(out, layer.output)


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """`bmm(weights, values)`, summed in pieces of fixed size: beyond some 190 positions the library chooses pieces by
    the padded length, which changes the bits. Pieces of padding add exact zeros.
    """
    total = torch.bmm(weights[..., :PIECE], values[:, :PIECE])
    for start in range(PIECE, weights.shape[-1], PIECE):
        total += torch.bmm(weights[..., start : start + PIECE], values[:, start : start + PIECE])
    return total


def choose_experts(shape: Architecture, layer: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor]:
    """Shares and ids of each row's experts, both [T padded, experts_per_token], by falling probability."""
    shares, chosen = F.linear(x, layer.router).softmax(-1).topk(shape.experts_per_token, -1)
    return shares / shares.sum(-1, keepdim=True) if shape.normalize_top_k else shares, chosen


def _experts(shape: Architecture, layer: LayerWeights, x: Tensor, routes: list[Tensor] | None) -> Tensor:
    """Top-k routed experts; each processes its own rows, gathered into a group padded to TOKEN_ROWS."""
    top = shape.experts_per_token
    shares, chosen = choose_experts(shape, layer, x)
    if routes is not None:
        routes.append(chosen)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=shape.experts)
    padded = (counts + (TOKEN_ROWS - 1)) // TOKEN_ROWS * TOKEN_ROWS
    ends = padded.cumsum(0)
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    places = torch.arange(len(flat)) + shift[flat[order]]
    grouped = x.new_zeros(len(flat) + TOKEN_ROWS * shape.experts, shape.hidden)
    grouped[places] = x[order // top]
    offsets = ends.to(torch.int32)
    both = F.grouped_mm(grouped, layer.gate_up, offs=offsets)
    gate, up = both.chunk(2, -1)
    result = F.grouped_mm(F.silu(gate) * up, layer.down, offs=offsets)
    back = torch.empty_like(order)
    back[order] = places
    return (result[back].view(-1, top, shape.hidden) * shares[..., None]).sum(1)
