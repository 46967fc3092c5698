"""Parts of an artifact in the making are found again as they were, or not at all, and never outlive their use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from contracts.digests import table_digest
from contracts.episodes import EPISODES, SEQUENCES
from contracts.failpoints import KILL_VARIABLE
from contracts.leftovers import sweep_leftovers
from contracts.parts import Parts
from contracts.store import LocalStore, Store
from contracts.upkeep import check_store, find_garbage, remove_garbage

ROOT = Path(__file__).parents[2]
KEY, OTHER = "a" * 64, "b" * 64
SCHEMAS = (SEQUENCES, pa.schema([("reward", pa.float64())]))
ROW = {"episode_id": "e", "index": 0, "token_ids": [1, 2], "token_role": [0, 1], "logprobs": [None, -0.5]}


def tables(index: int) -> list[pa.Table]:
    sequences = pa.Table.from_pylist([{**ROW, "index": index, "policy_spans": []}], schema=SEQUENCES)
    return [sequences, pa.Table.from_pylist([{"reward": None}, {"reward": 1.0 * index}], schema=SCHEMAS[1])]


def parts(store: Store, key: str = KEY) -> Parts:
    return Parts(store, "thing", key, SCHEMAS)


def test_parts_are_read_as_they_were_added_and_the_first_of_a_name_stays(store: Store) -> None:
    assert parts(store).read() == {}
    for index in range(3):
        parts(store).add(f"n{index}", tables(index))
    parts(store).add("n1", tables(7))
    found = parts(store).read()
    assert sorted(found) == ["n0", "n1", "n2"]
    for index in range(3):
        assert [table_digest(each) for each in found[f"n{index}"]] == [table_digest(each) for each in tables(index)]
    assert parts(store, OTHER).read() == {}


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "of another artifact", "of other tables"])
def test_a_part_that_is_not_what_was_added_is_not_believed_and_may_be_added_again(store: Store, damage: str) -> None:
    parts(store).add("n", tables(1))
    (key,) = store.list("artifacts/")
    data = store.get(key)
    store.delete(key)
    if damage == "of another artifact":
        parts(store, OTHER).add("n", tables(1))
        store.create(key, store.get(store.list(f"artifacts/thing/{OTHER}/")[0]))
    elif damage == "of other tables":
        Parts(store, "thing", KEY, [EPISODES]).add("n", [EPISODES.empty_table()])
    else:
        changed = data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]
        store.create(key, {"cut": data[:-1], "changed": changed, "empty": b""}[damage])
    assert parts(store).read() == {}
    parts(store).add("n", tables(1))
    assert list(parts(store).read()) == ["n"]


def test_abandoned_parts_are_garbage_and_used_ones_are_discarded(store: Store) -> None:
    parts(store).add("n", tables(1))
    parts(store, OTHER).add("n", tables(1))
    parts(store, OTHER).discard()
    assert find_garbage(store) == [], "a live process may go on with young ones"
    (found,) = find_garbage(store, -1.0)
    assert (found.what, found.place) == ("attempt", f"artifacts/thing/{KEY}/parts/")
    assert remove_garbage(store, found) and store.list("artifacts/") == []
    assert check_store(store).faults == []


MAKE = f"""
import sys
from pathlib import Path
from contracts.artifacts import ArtifactWriter
from contracts.parts import Parts
from contracts.store import LocalStore
store = LocalStore(Path(sys.argv[1]))
Parts(store, "thing", "{KEY}").add("n", [])
with ArtifactWriter(store, "thing", "{KEY}", parents={{}}, config={{}}, code_version="1") as out:
    out.add_bytes("data", b"1")
    out.commit()
    Parts(store, "thing", "{KEY}").discard()
"""


@pytest.mark.parametrize(
    ("point", "artifact", "kept"), [("artifact-staged", 0, 1), ("before-manifest", 1, 0), ("after-manifest", 1, 0)]
)
def test_parts_go_with_the_stage_of_a_killed_writer_once_the_artifact_exists(
    point: str, artifact: int, kept: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", MAKE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env={KILL_VARIABLE: point, "PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == -9
    store = LocalStore(tmp_path)
    sweep_leftovers(store)
    names = [key.split("/", 3)[3] for key in store.list("artifacts/")]
    assert names.count("manifest.json") == artifact and names.count("parts/n") == kept
    assert len(names) == 2 * artifact + kept, "nothing else is left"
