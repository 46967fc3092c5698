"""Slices of a checkpoint's tensors in a tensor-parallel worker. Rows and columns of scales are those of their
blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Slice = Callable[[Tensor], Tensor]


def rows(rank: int, size: int) -> Slice:
    """The rank's share of dimension 0."""
    return lambda whole: whole.chunk(size, 0)[rank] if size > 1 else whole


def columns(rank: int, size: int) -> Slice:
    """The rank's share of dimension 1."""
    return lambda whole: whole.chunk(size, 1)[rank] if size > 1 else whole


def query_key_value(layer: Any) -> tuple[Slice, Slice, Slice]:
    """Shares of q, k and v in a QKVParallelLinear. If there are few key heads, several ranks have the same ones."""
    keys = rows(layer.tp_rank // layer.num_kv_head_replicas, max(1, layer.tp_size // layer.num_kv_head_replicas))
    return rows(layer.tp_rank, layer.tp_size), keys, keys


def vocabulary(layer: Any) -> Slice:
    """The rank's rows of an embedding."""
    indices = layer.shard_indices
    return lambda whole: whole[indices.org_vocab_start_index : indices.org_vocab_end_index]


def owned_experts(layer: Any, count: int) -> list[int]:
    """Numbers of the rank's experts, in the order of its parameters."""
    places: Tensor | None = layer.expert_map
    if places is None:
        return list(range(count))
    return [int(expert) for expert in torch.argsort(places) if places[expert] >= 0]
