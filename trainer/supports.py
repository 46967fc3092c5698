"""Recorded supports of a dataset's rows, checked against their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from contracts.errors import SchemaError
from contracts.supports import decode_supports
from trainer.data import Rows, SupportRows
from trainer.errors import TrainingDataError
from trainer.flat import flat_array


def read_supports(
    sequences: Rows, column: Callable[[], Iterable[pa.Array]], what: str, vocabulary: int, folder: Path | None
) -> SupportRows | None:
    """Supports of each sequence; None if no row has any. column: opens `contracts.episodes.SUPPORTS`, part by part.
    folder: see `flat_array`.

    Raises TrainingDataError with `what`, the row number and the fault.
    """
    sizes = [pc.fill_null(pc.binary_length(part), 0).to_numpy() for part in column()]
    flat = flat_array(int(sum(each.sum() for each in sizes)), np.uint8, folder)
    end, recorded = 0, False
    for row, value in enumerate(value.as_py() for part in column() for value in part):
        if value is None:
            continue
        _require_record(value, sequences[row].token_ids, f"{what} row {row}", vocabulary)
        flat[end : end + len(value)] = np.frombuffer(value, np.uint8)
        end, recorded = end + len(value), True
    return SupportRows(flat, np.concatenate(sizes).astype(np.int64)) if recorded else None


def _require_record(value: bytes, token_ids: np.ndarray, where: str, vocabulary: int) -> None:
    try:
        fault = decode_supports(value).fault(token_ids, vocabulary)
    except SchemaError as error:
        raise TrainingDataError(f"{where}: {error}") from None
    if fault:
        raise TrainingDataError(f"{where}: the record of supports {fault}: sample the rollouts again")
