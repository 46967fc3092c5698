"""Forward pass for sampling: plain torch, with bits that do not depend on the batch. Tensors are float32,
rounded where the policy's recipe says so (`numerics`).

    tokens [T] -> embedding -> layers x (norm, attention over the cache, norm, MLP or routed experts)
    -> hidden [T, hidden] -> logits

A row's bits are the same in every batch, and in prefill and decode, since every product has a row count padded to a
multiple of 16 (4 in attention), the cached length is padded to a multiple of 8 (at least 16), one product computes the
softmax's sum and values, and experts get only their own rows, padded likewise. Reference: transformers'
classes of the families in `contracts.architectures`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from contracts.architectures import Architecture, inverse_frequencies
from inference.engines.kv import ROW, KvCache, round_up
from inference.engines.numerics import Numerics
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
        self._inverse = inverse_frequencies(shape)
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

    routes: output list for each layer's chosen experts, [T padded, experts_per_token]; stays empty in a dense model.
    """
    shape, numerics = weights.architecture, weights.numerics
    cos, sin = (numerics.rounded(table) for table in rotary.tables(batch))
    x = weights.embedding[batch.tokens]
    for index, layer in enumerate(weights.layers):
        normed = _norm(numerics, x, layer.input_norm, shape)
        x = numerics.round(x + _attention(shape, numerics, layer, cache, index, batch, cos, sin, normed))
        normed = _norm(numerics, x, layer.post_norm, shape)
        added = _experts(shape, numerics, layer, normed, routes) if shape.experts else _mlp(numerics, layer, normed)
        x = numerics.round(x + added)
    return _norm(numerics, x, weights.norm, shape)


def logits_of(weights: Weights, hidden: Tensor) -> Tensor:
    """Logits [N, vocabulary] of hidden rows [N, hidden], computed over a padded row count."""
    rows = hidden.shape[0]
    padded = F.pad(hidden, (0, 0, 0, -rows % TOKEN_ROWS))
    return weights.numerics.head(padded, weights.head)[:rows]


def _norm(numerics: Numerics, x: Tensor, weight: Tensor, shape: Architecture) -> Tensor:
    normal = numerics.rounded(F.rms_norm(numerics.wide(x), (shape.hidden,), None, shape.epsilon))
    return numerics.round(normal * numerics.wide(weight))


def _attention(
    shape: Architecture,
    numerics: Numerics,
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
    mixed = numerics.linear(x, layer.qkv).view(-1, heads + 2 * kv_heads, dim)
    qk = numerics.wide(mixed[:, : heads + kv_heads])
    if layer.qk_norm is not None:
        normal = numerics.rounded(F.rms_norm(qk, (dim,), None, shape.epsilon))
        qk = numerics.wide(numerics.round(normal * layer.qk_norm))
    qk = numerics.round(numerics.rounded(qk * cos) + numerics.rounded(qk.roll(dim // 2, -1) * sin))
    keys, values = cache.keys[index], cache.values[index]
    keys[batch.slots, :, batch.positions[:count]] = qk[:count, heads:]
    values[batch.slots, :, batch.positions[:count], :dim] = mixed[:count, heads + kv_heads :]

    groups, rows, length = heads // kv_heads, batch.rows, batch.length
    query = numerics.wide(x.new_zeros(rows * batch.width, heads, dim))
    query[batch.cells] = numerics.wide(qk[:count, :heads]) * dim**-0.5
    query = (
        query.view(rows, batch.width, heads, dim).transpose(1, 2).reshape(rows * kv_heads, groups * batch.width, dim)
    )
    slots = slice(batch.first, batch.first + rows)
    k, v = (numerics.wide(each[slots, :, :length].flatten(0, 1)) for each in (keys, values))
    scores = torch.bmm(query, k.transpose(1, 2)).view(rows, heads, batch.width, length)
    scores.masked_fill_(batch.unseen, -torch.inf)
    scores -= scores.amax(-1, keepdim=True)
    summed = _weighted_sum(scores.exp_().view(rows * kv_heads, groups * batch.width, length), v)
    mean = (summed[..., :dim] / summed[..., dim : dim + 1]).view(rows, heads, batch.width, dim).transpose(1, 2)
    out = x.new_zeros(x.shape[0], heads * dim)
    out[:count] = numerics.round(mean.reshape(rows * batch.width, heads * dim)[batch.cells])
    return numerics.linear(out, layer.output)


def _weighted_sum(weights: Tensor, values: Tensor) -> Tensor:
    """`bmm(weights, values)`, summed in pieces of fixed size: beyond some 190 positions the library chooses pieces by
    the padded length, which changes the bits. Pieces of padding add exact zeros.
    """
    total = torch.bmm(weights[..., :PIECE], values[:, :PIECE])
    for start in range(PIECE, weights.shape[-1], PIECE):
        total += torch.bmm(weights[..., start : start + PIECE], values[:, start : start + PIECE])
    return total


def _mlp(numerics: Numerics, layer: LayerWeights, x: Tensor) -> Tensor:
    gate, up = numerics.linear(x, layer.gate_up).chunk(2, -1)
    inner = numerics.round(numerics.round(F.silu(numerics.wide(gate))) * up)
    return numerics.linear(inner, layer.down)


def choose_experts(shape: Architecture, numerics: Numerics, layer: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor]:
    """Shares and ids of each row's experts, both [T padded, experts_per_token], by falling probability."""
    assert layer.router is not None
    shares, chosen = numerics.router(x, layer.router).softmax(-1).topk(shape.experts_per_token, -1)
    return shares / shares.sum(-1, keepdim=True) if shape.normalize_top_k else shares, chosen


def _experts(
    shape: Architecture, numerics: Numerics, layer: LayerWeights, x: Tensor, routes: list[Tensor] | None
) -> Tensor:
    """Top-k routed experts; each processes its own rows, gathered into a group padded to TOKEN_ROWS."""
    top = shape.experts_per_token
    shares, chosen = choose_experts(shape, numerics, layer, x)
    if routes is not None:
        routes.append(chosen)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=shape.experts)
    padded = (counts + (TOKEN_ROWS - 1)) // TOKEN_ROWS * TOKEN_ROWS
    ends = padded.cumsum(0)
    shift = (ends - padded) - (counts.cumsum(0) - counts)
    places = torch.arange(len(flat)) + shift[flat[order]]
    operand = numerics.operand(x)
    grouped = operand.new_zeros(len(flat) + TOKEN_ROWS * shape.experts, shape.hidden)
    grouped[places] = operand[order // top]
    offsets = ends.to(torch.int32)
    both = numerics.grouped(grouped, layer.gate_up, offsets)
    gate, up = both.chunk(2, -1)
    inner = numerics.round(numerics.round(F.silu(numerics.wide(gate))) * up)
    result = numerics.grouped(numerics.operand(inner), layer.down, offsets)
    back = torch.empty_like(order)
    back[order] = places
    return numerics.round((result[back].view(-1, top, shape.hidden) * shares[..., None]).sum(1))
