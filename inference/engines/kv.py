"""Key-value cache with one slot for each sequence; used slots are contiguous, so that attention reads a slice."""

from __future__ import annotations

import torch
from torch import Tensor

from contracts.architectures import Architecture

ROW = 8
"""Lengths and row counts are padded to this, so that CPU matrix products give a row the same bits in every batch."""
LANES = 8
"""Extra columns of the value cache; the first is 1, so that the product also gives the sum of the weights."""


def round_up(size: int, unit: int) -> int:
    """Smallest multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


class KvCache:
    """keys [layers, slots, kv_heads, length, head_dim], values [..., head_dim + LANES], float32; both grow by
    doubling.
    """

    def __init__(self, shape: Architecture, slots: int = 16, length: int = 64) -> None:
        self._shape = shape
        self.slots, self.length = slots, length
        self.keys, self.values = self._allocate(slots, length)

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `slots` sequences of up to `length` tokens, keeping the cached ones. Raises MemoryError; the
        cache then stays as it is.
        """
        if slots <= self.slots and length <= self.length:
            return
        old_slots, old_length, old = self.slots, self.length, (self.keys, self.values)
        new_slots, new_length = old_slots, old_length
        while new_slots < slots:
            new_slots *= 2
        while new_length < length:
            new_length *= 2
        try:
            new = self._allocate(new_slots, new_length)
        except RuntimeError as error:  # torch's allocator
            raise MemoryError(f"no memory for {new_slots} sequences of {new_length} tokens") from error
        for target, source in zip(new, old, strict=True):
            target[:, :old_slots, :, :old_length] = source
        self.slots, self.length, (self.keys, self.values) = new_slots, new_length, new

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` into slot `target`."""
        self.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        self.values[:, target, :, :length] = self.values[:, source, :, :length]

    def copy_out(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """A compact copy of a slot's first `length` positions."""
        return self.keys[:, slot, :, :length].clone(), self.values[:, slot, :, :length].clone()

    def copy_in(self, slot: int, entry: tuple[Tensor, Tensor]) -> None:
        """The inverse of `copy_out`."""
        keys, values = entry
        self.keys[:, slot, :, : keys.shape[2]] = keys
        self.values[:, slot, :, : values.shape[2]] = values

    def _allocate(self, slots: int, length: int) -> tuple[Tensor, Tensor]:
        shape = self._shape
        size = (shape.layers, slots, shape.kv_heads, length)
        keys = torch.zeros(*size, shape.head_dim)
        values = torch.zeros(*size, shape.head_dim + LANES)
        values[..., shape.head_dim] = 1.0
        return keys, values
