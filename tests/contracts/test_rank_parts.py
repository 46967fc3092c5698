"""Ranks in processes of their own stage one artifact: whoever is killed when, it is whole or absent."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from rank_world import FORMS, KEY, NAME, PART, RANKS, content, share, start

from contracts import tensor_parts
from contracts.artifacts import ArtifactWriter, find_artifact
from contracts.errors import InfraFault, SchemaError
from contracts.leftovers import sweep_leftovers
from contracts.rank_parts import gather_parts, stage_parts
from contracts.store import LocalStore, scratch_directory
from contracts.tensor_files import INDEX, TensorFiles
from contracts.tensor_parts import add_parts, add_tensors


def launch(
    store: LocalStore, kill: Mapping[int, str], after: Callable[[list[BaseProcess]], None], timeout_s: float = 5.0
) -> bool:
    """Run all ranks, with a failpoint for some. after: called once all have started. Returns whether all succeeded."""
    with scratch_directory(store) as folder:
        ranks = start(store.url, folder, RANKS, kill, timeout_s)
        after(ranks)
        for each in ranks:
            each.join(60)
    return [each.exitcode for each in ranks] == [0] * RANKS


def digest_of_one_writer(store: LocalStore) -> str:
    with ArtifactWriter(store, "thing", KEY, parents={}, config={}, code_version="1") as out:
        add_tensors(out, NAME, FORMS, content)
        return out.commit().ref.digest


def check_rerun(store: LocalStore, digest: str) -> None:
    """What a reader sees after a kill, and after the next run."""
    found = find_artifact(store, "thing", KEY)
    if found is not None:
        assert found.ref.digest == digest
        assert TensorFiles(found.directory(), NAME).forms == FORMS
    sweep_leftovers(store)
    assert launch(store, {}, lambda ranks: None, timeout_s=60.0)
    found = find_artifact(store, "thing", KEY)
    assert found is not None and found.ref.digest == digest and f"{NAME}{INDEX}" in found.names()
    target = bytearray(FORMS["t07"][1][0])
    TensorFiles(found.directory(), NAME).read_into("t07", memoryview(target))
    assert target == content("t07")
    named = {f"{found.ref.uri}/{found.manifest.attempt}/{name}" for name in found.names()}
    assert set(store.list("artifacts/")) == named | {f"{found.ref.uri}/manifest.json"}, "nothing else is left"
    assert not list(store.scratch.iterdir())


POINTS = [
    *((0, point) for point in ("part-written:1", "part-written:2", "rank-staged", "ranks-gathered", "artifact-staged")),
    *((0, f"store-write:{number}") for number in (1, 2, 6, 7, 8)),
    *((0, point) for point in ("before-manifest", "after-manifest")),
    *((rank, point) for rank in (1, 2) for point in ("part-written:1", "part-written:2", "rank-staged")),
]


@pytest.mark.parametrize(("rank", "point"), POINTS)
def test_a_rank_killed_at_a_failpoint_leaves_a_whole_artifact_or_none(tmp_path: Path, rank: int, point: str) -> None:
    digest = digest_of_one_writer(LocalStore(tmp_path / "calm"))
    store = LocalStore(tmp_path / "store")
    assert not launch(store, {rank: point}, lambda ranks: None)
    assert (find_artifact(store, "thing", KEY) is not None) == (point == "after-manifest")
    check_rerun(store, digest)


@pytest.mark.parametrize("seed", range(8))
def test_a_rank_killed_at_any_time_leaves_a_whole_artifact_or_none(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    digest = digest_of_one_writer(LocalStore(tmp_path / "calm"))
    store = LocalStore(tmp_path / "store")

    def kill(ranks: list[BaseProcess]) -> None:
        time.sleep(chance.uniform(0, 0.2))
        chance.choice(ranks).kill()

    whole = launch(store, {}, kill)
    assert find_artifact(store, "thing", KEY) is not None or not whole
    check_rerun(store, digest)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Parts of two ranks."""
    monkeypatch.setattr(tensor_parts, "PART_BYTES", PART)
    for rank in (0, 1):
        stage_parts(tmp_path, rank, 2, share(rank, 2), content)
    return tmp_path


def test_the_commit_waits_for_a_rank_and_names_it(folder: Path) -> None:
    (folder / "part-1.json").unlink()
    started = time.monotonic()
    with pytest.raises(InfraFault, match=r"rank 1 of 2 did not write its parts to .* within 0\.2 s"):
        gather_parts(folder, 2, FORMS, 0.2)
    assert time.monotonic() - started >= 0.2


def test_the_commit_does_not_wait_for_a_dead_rank(tmp_path: Path) -> None:
    ranks = start(str(tmp_path / "store"), str(tmp_path), 2, {0: "rank-staged", 1: "part-written:2"}, 60.0)
    for each in ranks:
        each.join(60)
    stage_parts(tmp_path, 0, 2, share(0, 2), content)
    with pytest.raises(InfraFault, match=r"rank 1 of 2 died before its parts were written"):
        gather_parts(tmp_path, 2, FORMS, 60.0)


def reorder(folder: Path) -> None:
    (folder / "part-0.json").replace(folder / "part-1.json")
    stage_parts(folder, 0, 2, share(0, 2), content)


def flip(folder: Path) -> None:
    path = folder / "rank-1-2.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")


def declare_other_tensors(folder: Path) -> None:
    body = json.loads((folder / "part-1.json").read_text())
    body["parts"][0]["tensors"]["t98"] = body["parts"][0]["tensors"].pop("t01")
    (folder / "part-1.json").write_text(json.dumps(body))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (reorder, r"part-1\.json is of rank 0 of 2, not 1 of 2"),
        (flip, r"rank-1-2\.safetensors does not hold the bytes that its rank declared"),
        (declare_other_tensors, r"rank-1-1\.safetensors does not hold the tensors that its rank declared"),
        (
            lambda folder: (folder / "rank-0-1.safetensors").unlink(),
            r"rank-0-1\.safetensors is declared .* but missing",
        ),
        (lambda folder: (folder / "part-0.json").write_text("{"), r"part-0\.json is damaged"),
        (
            lambda folder: stage_parts(folder, 1, 2, FORMS, content),
            r"tensor t00 is in two parts, rank-0-1\.safetensors",
        ),
        (lambda folder: stage_parts(folder, 1, 2, {}, content), r"no rank wrote tensor t01"),
        (
            lambda folder: stage_parts(
                folder,
                1,
                2,
                {**share(1, 2), "t01": ("I8", (7,))},
                lambda name: memoryview(bytes(7) if name == "t01" else content(name)),
            ),
            r"tensor t01 is \('I8', \(7,\)\), expected \('U8', \(100001,\)\)",
        ),
        (
            lambda folder: stage_parts(
                folder,
                1,
                2,
                {**share(1, 2), "t18": ("U8", (0,))},
                lambda name: memoryview(b"" if name == "t18" else content(name)),
            ),
            "were not asked for: t18",
        ),
    ],
)
def test_parts_that_contradict_are_refused_by_name(folder: Path, damage: Callable[[Path], None], said: str) -> None:
    damage(folder)
    with pytest.raises(SchemaError, match=said):
        gather_parts(folder, 2, FORMS, 1.0)


def test_a_single_part_becomes_the_single_file(tmp_path: Path) -> None:
    stage_parts(tmp_path, 0, 2, FORMS, content)
    stage_parts(tmp_path, 1, 2, {}, content)
    store = LocalStore(tmp_path / "store")
    with ArtifactWriter(store, "thing", "1" * 64, parents={}, config={}, code_version="1") as out:
        add_parts(out, NAME, gather_parts(tmp_path, 2, FORMS, 1.0), tmp_path)
        assert out.commit().names() == [NAME]
    assert find_artifact(store, "thing", "1" * 64).ref.digest == digest_of_one_writer(store)  # type: ignore[union-attr]
