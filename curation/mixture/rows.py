"""Write the rows of one source: tokens and roles, most for training and a few whole tasks for validation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from contracts.artifacts import ArtifactWriter
from contracts.digests import sha256, table_digest

ROWS = pa.schema(
    [
        ("token_ids", pa.list_(pa.int32())),
        ("token_role", pa.list_(pa.uint8())),
        ("clean", pa.bool_()),
        ("episode_id", pa.string()),
        ("task_id", pa.string()),
    ]
)
"""One row per sequence. clean: always true, since every row is to be imitated. task_id: null if the source has none."""
HELD_OUT = 64
"""Rows for validation, at most, and at most a tenth, unless each task has more."""
_TRAIN, _VALIDATION, _ALL = "train.parquet", "validation.parquet", "all.parquet"


def write_rows(out: ArtifactWriter, tables: Iterable[tuple[pa.Table, Sequence[str]]]) -> dict[str, int]:
    """Stage train.parquet and validation.parquet. tables: ROWS, a few at a time, with the text that tells the task of
    each row. Returns the numbers of rows; both files have one unless there are none at all.

    The rows of a task are in one of the files: validation has the first tasks, by digest, that fit into `HELD_OUT` and
    a tenth of the rows, or the smallest task if none does. A source of one task has the same rows in both.
    """
    whole, keys = out.directory / _ALL, list[str]()
    with pq.ParquetWriter(whole, ROWS, compression="zstd") as file:
        for table, names in tables:
            file.write_table(table)
            keys += [sha256(name.encode()) for name in names]
    held = np.isin(keys, _held(keys))
    everything = bool(held.all())
    counts = {_TRAIN: 0, _VALIDATION: 0}
    for name, mask in ((_TRAIN, held if everything else ~held), (_VALIDATION, held)):
        first = 0
        with pq.ParquetWriter(out.directory / name, ROWS, compression="zstd") as file:
            for batch in pq.ParquetFile(whole).iter_batches(256):
                kept = batch.filter(pa.array(mask[first : first + batch.num_rows]))
                file.write_batch(kept)
                first, counts[name] = first + batch.num_rows, counts[name] + kept.num_rows
        out.add_file(name, table_digest(pq.read_table(out.directory / name, memory_map=True)))
    whole.unlink()
    return {"train": counts[_TRAIN], "validation": counts[_VALIDATION]}


def _held(keys: Sequence[str]) -> list[str]:
    """Keys of the tasks for validation, but never of all tasks if there are several."""
    counts, found = Counter(keys), list[str]()
    room = min(HELD_OUT, max(1, len(keys) // 10))
    for key in sorted(counts):
        if counts[key] <= room:
            found.append(key)
            room -= counts[key]
    return found or sorted(counts, key=lambda key: (counts[key], key))[:1]
