"""Flat arrays with one part for each row: in memory while small, else in a file that the kernel pages in and out.

An array of more than `IN_MEMORY` bytes lies in a file without a name, which the system removes with the process. Its
pages are not counted as the process's own memory and can be written back, so a dataset may be larger than the memory.
"""

from __future__ import annotations

import os
import tempfile
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from contracts.errors import describe
from trainer.errors import TrainingError

IN_MEMORY = 64 << 20
"""Largest array in memory, in bytes."""


def flat_array(count: int, dtype: Any, folder: Path | None) -> np.ndarray:
    """Zeros of the shape [count]. folder: for the file of a large array; None: always in memory.

    Raises TrainingError if the folder's disk is full.
    """
    size = count * np.dtype(dtype).itemsize
    if folder is None or size <= IN_MEMORY:
        return np.zeros(count, dtype)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # reserve the space: a full disk would otherwise kill the process when it writes to the mapping
            os.posix_fallocate(file.fileno(), 0, size)
            return np.memmap(file, dtype, "r+", shape=(count,))
    except OSError as error:
        raise TrainingError(f"{folder} has no room for {size >> 20} MiB of training data: {describe(error)}") from None


class _Rows(Sequence[Tensor]):
    """A tensor for each row."""

    def __init__(self, sizes: np.ndarray) -> None:
        """sizes: int64 [rows], elements of each row."""
        self._sizes = sizes

    @abstractmethod
    def _row(self, row: int) -> Tensor:
        """Tensor of one row."""

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, row: int) -> Tensor: ...
    @overload
    def __getitem__(self, row: slice) -> list[Tensor]: ...
    def __getitem__(self, row: int | slice) -> Tensor | list[Tensor]:
        if isinstance(row, slice):
            return [self._row(each) for each in range(*row.indices(len(self)))]
        return self._row(row)


class Ragged(_Rows):
    """A float32 tensor for each row, all in one flat array."""

    def __init__(self, flat: np.ndarray, sizes: np.ndarray) -> None:
        """flat: float32 [sum of sizes], shared. sizes: int64 [rows]."""
        super().__init__(sizes)
        self.flat = torch.from_numpy(flat)
        """float32 [sum of sizes]."""
        self._ends = np.cumsum(sizes)
        self._starts = self._ends - sizes

    @classmethod
    def zeros(cls, sizes: np.ndarray, folder: Path | None) -> Ragged:
        """Zeros for rows of these sizes. folder: see `flat_array`."""
        return cls(flat_array(int(sizes.sum()), np.float32, folder), sizes)

    def _row(self, row: int) -> Tensor:
        return self.flat[self._starts[row] : self._ends[row]]


class Repeated(_Rows):
    """One number for each row, as often as the row has tokens."""

    def __init__(self, values: Tensor, sizes: np.ndarray) -> None:
        """values: [rows]. sizes: int64 [rows]."""
        super().__init__(sizes)
        self._values = values

    def _row(self, row: int) -> Tensor:
        return self._values[row].expand(int(self._sizes[row]))


def pieces(values: Sequence[Tensor], size: int = 1 << 20) -> Iterable[Tensor]:
    """The tensors end to end, in pieces of at most `size` numbers."""
    return torch.split(values.flat if isinstance(values, Ragged) else torch.cat(list(values)), size)
