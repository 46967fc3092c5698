"""Data that is larger than the memory: read batch by batch, kept in flat arrays, the same numbers as in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trainer_rl import own_dataset
from trainer_world import TRAIN, World

from contracts.artifacts import ArtifactWriter, open_artifact
from contracts.digests import digest_of
from contracts.store import open_store
from trainer import flat
from trainer.config import RlConfig
from trainer.data import RowsReader
from trainer.errors import TrainingDataError, TrainingError
from trainer.experience import read_experience
from trainer.flat import Ragged, Repeated, flat_array
from trainer.mismatch import mismatch_metrics
from trainer.run import run_job

CONFIG = {"vocab_size": 100, "max_position_embeddings": 64, "num_hidden_layers": 1, "num_experts_per_tok": 1}
ROW = st.lists(st.tuples(st.integers(0, 99), st.integers(0, 3)), min_size=2, max_size=20).filter(
    lambda row: row[0][1] != 1 and any(role == 1 for _, role in row)
)


@settings(deadline=None)
@given(st.lists(ROW, min_size=1, max_size=20), st.integers(1, 5))
def test_rows_are_those_of_the_table_whatever_its_batches(rows: list[list[tuple[int, int]]], size: int) -> None:
    table = pa.table(
        {
            "token_ids": pa.array([[token for token, _ in row] for row in rows], pa.list_(pa.int32())),
            "token_role": pa.array([[role for _, role in row] for row in rows], pa.list_(pa.uint8())),
        }
    )
    reader = RowsReader("rows", 100, 64, sum(map(len, rows)))
    for batch in table.to_batches(max_chunksize=size):
        reader.add(batch)
    found = reader.finish()
    assert len(found) == len(rows)
    for row, sequence in zip(rows, found, strict=True):
        assert sequence.token_ids.tolist() == [token for token, _ in row]
        assert sequence.scored.tolist() == [place for place, (_, role) in enumerate(row) if role == 1]
    assert found.lengths.tolist() == [len(row) for row in rows]
    assert found.scored.tolist() == [len(found[index].scored) for index in range(len(rows))]


def dataset_of(world: World, rows: list[dict[str, Any]]) -> Any:
    members = [{"episode_id": row["episode_id"], "group_id": "g", "reward": 1.0, "kept": True} for row in rows]
    return world.dataset(rows, members)


def row(number: int, **values: Any) -> dict[str, Any]:
    usual = {
        "episode_id": f"e{number:04}",
        "group_id": "g",
        "group_index": 0,
        "token_ids": [1, 2, 3],
        "token_role": [0, 1, 1],
        "logprobs": [None, -1.0, -2.0],
        "policy_versions": ["v"],
        "reward": 1.0,
    }
    return {**usual, **values}


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"token_ids": [1, 2, 100]}, "row 300 has a token id outside 0..99"),
        ({"token_ids": [1, None, 3]}, "row 300 has a token id outside 0..99"),
        ({"token_ids": [1, 2]}, "row 300 has 2 tokens and 3 roles"),
        ({"token_ids": [], "token_role": []}, "row 300 has 0 tokens and 0 roles"),
        ({"token_role": [1, 1, 1]}, "row 300 begins with a token of the role POLICY, which nothing predicts"),
        ({"token_role": [1, 0, 0]}, "row 300 begins with a token of the role POLICY, which nothing predicts"),
        ({"token_role": [0, 0, 0]}, "row 300 has no policy token after its first position"),
        ({"token_role": [0, 1, 4]}, "row 300 has a token of the role 4: use one of 0 prompt, 1 policy"),
        ({"token_role": [0, 1, None]}, "row 300 has a token of the role null: use one of 0 prompt"),
        ({"logprobs": [None, 2.0, -2.0]}, "row 300 has the log probability 2 of a policy token, which is at most 0"),
        ({"logprobs": [None, None, -2.0]}, "row 300 lacks the logprob of a policy token"),
        ({"logprobs": [None, -2.0]}, "row 300 lacks the logprob of a policy token"),
        (
            {"token_ids": [1] * 65, "token_role": [0] + [1] * 64, "logprobs": [-1.0] * 65},
            "row 300 has 65 tokens, the model accepts 64",
        ),
    ],
)
def test_a_bad_row_of_a_later_batch_is_named(world: World, values: dict[str, Any], fault: str) -> None:
    rows = [row(number) for number in range(300)] + [row(300, **values)]
    with pytest.raises(TrainingDataError, match=fault):
        read_experience(dataset_of(world, rows), CONFIG, RlConfig(), 0)


def test_a_truncated_or_missing_column_is_refused_by_name(world: World) -> None:
    with ArtifactWriter(world.store, "dataset", digest_of("no"), parents={}, config={}, code_version="1") as out:
        out.add_table("train.parquet", pa.table({"token_ids": pa.array([[1]], pa.list_(pa.int32()))}))
        made = out.commit()
    with pytest.raises(Exception, match=r"train\.parquet is not a Parquet file with these columns .*token_role"):
        read_experience(made, CONFIG, RlConfig(), 0)


def test_arrays_in_files_give_the_same_bits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def results() -> list[str]:
        start = run_job(world.sft_job(f"base-{flat.IN_MEMORY}", max_steps=3))
        dataset = own_dataset(world, start)
        found = [start]
        for config in ({}, {"algorithm": {"kind": "ppo"}}):
            name = f"{flat.IN_MEMORY}-{len(found)}"
            found.append(run_job(world.rl_job(name, dataset, start.checkpoint, start.trainer_state, **config)))
        return [digest for each in found for digest in (each.checkpoint.digest, each.trainer_state.digest)]

    in_memory = results()
    monkeypatch.setattr(flat, "IN_MEMORY", 0)
    assert results() == in_memory
    assert list(world.store.scratch.iterdir()) == []


def test_large_arrays_lie_in_a_file_without_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "IN_MEMORY", 100)
    assert not isinstance(flat_array(25, np.float32, tmp_path), np.memmap)
    large = flat_array(26, np.float32, tmp_path)
    assert isinstance(large, np.memmap) and not large.any() and list(tmp_path.iterdir()) == []
    assert not isinstance(flat_array(26, np.float32, None), np.memmap)
    with pytest.raises(TrainingError, match="has no room for"):
        flat_array(1 << 50, np.float32, tmp_path)


def test_rows_of_ragged_arrays_are_views() -> None:
    sizes = np.array([2, 0, 3])
    ragged = Ragged.zeros(sizes, None)
    ragged[2].fill_(4.0)
    assert ragged.flat.tolist() == [0, 0, 4, 4, 4] and len(ragged[1]) == 0
    assert [each.tolist() for each in Repeated(torch.tensor([1.0, 2.0, 3.0]), sizes)] == [[1, 1], [], [3, 3, 3]]


def test_mismatch_of_many_pieces_is_that_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)
    ours, theirs = (-torch.rand(50, generator=draw) for _ in range(2))
    whole = mismatch_metrics([ours], [theirs])
    monkeypatch.setattr("trainer.mismatch.pieces", lambda values: torch.split(torch.cat(list(values)), 7))
    assert mismatch_metrics([ours], [theirs]) == pytest.approx(whole, rel=1e-12)


TOKENS, LENGTH = 230_000_000, 2000
READ = """
import json, sys, threading, time
from pathlib import Path
from contracts.artifacts import list_artifacts
from contracts.store import open_store
from trainer.config import RlConfig
from trainer.data import cut_by_lengths, lengths_of, make_batch, scored_of
from trainer.experience import read_experience
from trainer.mismatch import mismatch_metrics
from trainer.rl import minibatches
from trainer.rl_progress import Start

def resident():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10

peak = before = resident()
def watch():
    global peak
    while True:
        peak = max(peak, resident())
        time.sleep(0.005)
threading.Thread(target=watch, daemon=True).start()
store = open_store(sys.argv[1])
(dataset,) = list_artifacts(store, "dataset")
config = {"vocab_size": 50000, "max_position_embeddings": 4096}
found = read_experience(dataset, config, RlConfig(), 0, store.scratch)
start = Start.empty(scored_of(found.sequences), found.folder, critic=True)
start.logprobs.flat.copy_(found.sampler_logprobs.flat)
mismatch_metrics(start.logprobs, found.sampler_logprobs)
tokens = 0
for rows in minibatches(found.groups, 8, 1):
    for part in cut_by_lengths(lengths_of(found.sequences)[rows], 1 << 16)[:20]:
        tokens += len(make_batch([found.sequences[rows[index]] for index in part]).token_ids)
print(json.dumps({"peak": peak, "before": before, "rows": len(found.sequences), "tokens": tokens}))
"""


@pytest.mark.large
@pytest.mark.timeout(1800)
def test_a_dataset_of_2_gb_trains_in_bounded_memory(tmp_path: Path) -> None:
    """Memory of the process's own, beyond that of the imports: a quarter of a gigabyte, for 2 GB of rows."""
    store = open_store(str(tmp_path / "store"))
    count, chunk = TOKENS // LENGTH, 1000
    draw = np.random.default_rng(0)
    role = np.tile(np.repeat(np.array([0, 1], np.uint8), [LENGTH // 4, LENGTH - LENGTH // 4]), chunk)
    offsets = np.arange(chunk + 1, dtype=np.int32) * LENGTH
    names = [f"e{number:06}" for number in range(count)]
    with ArtifactWriter(store, "dataset", digest_of("large"), parents={}, config={}, code_version="1") as out:
        with pq.ParquetWriter(out.directory / "train.parquet", TRAIN, compression="none") as writer:
            for first in range(0, count, chunk):
                lists = [
                    pa.ListArray.from_arrays(offsets, pa.array(values))
                    for values in (
                        draw.integers(0, 50_000, len(role), np.int32),
                        role,
                        -draw.random(len(role), np.float32),
                    )
                ]
                own = names[first : first + chunk]
                columns = [
                    pa.array(own),
                    pa.array([name[:5] for name in own]),
                    pa.array(np.zeros(len(own), np.int32)),
                    *lists,
                    pa.array([["v"]] * len(own)),
                    pa.array(np.ones(len(own), np.float32)),
                ]
                writer.write_table(pa.Table.from_arrays(columns, schema=TRAIN))
        out.add_file("train.parquet")
        members = {"episode_id": names, "group_id": [name[:5] for name in names], "reward": [1.0] * count}
        out.add_table("members.parquet", pa.table({**members, "group_reward_mean": [1.0] * count}))
        made = out.commit()
    size = open_artifact(store, made.ref).path("train.parquet").stat().st_size
    assert size > 1_400_000_000  # Parquet packs the roles; 2 GB in memory
    done = subprocess.run(
        [sys.executable, "-c", READ, store.url], capture_output=True, text=True, timeout=1500, check=True
    )
    found = json.loads(done.stdout)
    print(f"{size >> 20} MiB of rows; peak {found['peak'] >> 20} MiB, of which the imports {found['before'] >> 20} MiB")
    assert found["rows"] == count and found["tokens"] > 1_000_000
    assert found["peak"] - found["before"] < 256 << 20
