"""A store's upkeep, in a directory and on S3: damage is named, garbage goes, and what a manifest names is never
touched.
"""

from __future__ import annotations

import os
from pathlib import Path

import boto3
import pytest

from contracts.artifacts import Artifact, ArtifactWriter, find_artifact
from contracts.digests import sha256
from contracts.s3store import S3Store
from contracts.store import STAGE, LocalStore, Store
from contracts.upkeep import Garbage, check_store, find_garbage, remove_garbage

NOW = -1.0
"""Seconds that spare nothing, however young."""
KEY, OTHER = "a" * 64, "b" * 64


def write(store: Store, key: str = KEY) -> Artifact:
    with ArtifactWriter(store, "thing", key, parents={}, config={}, code_version="1") as out:
        out.add_bytes("data.bin", key.encode() * 100)
        out.add_json("facts.json", {"key": key})
        return out.commit()


def file_of(artifact: Artifact, name: str) -> str:
    return f"{artifact.ref.uri}/{artifact.manifest.attempt}/{name}"


def test_a_whole_store_has_no_faults(store: Store) -> None:
    artifacts, seen = [write(store), write(store, OTHER)], []
    checked = check_store(store, lambda done, total: seen.append((done, total)))
    size = sum(entry.size for artifact in artifacts for entry in artifact.manifest.files)
    assert (checked.artifacts, checked.files, checked.size, checked.faults) == (2, 4, size, [])
    assert seen[-1] == (size, size)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda data: None, "is gone"),
        (lambda data: data[:-1], "bytes in the place of"),
        (lambda data: b"x" + data[1:], "has other bytes than were committed"),
    ],
)
def test_a_file_that_is_not_what_was_committed_is_named(store: Store, damage: object, fault: str) -> None:
    write(store, OTHER)
    key = file_of(write(store), "data.bin")
    data = damage(store.get(key))  # type: ignore[operator]
    cached = store.local_path(key)
    assert cached.exists()
    store.delete(key)
    if data is not None:
        store.create(key, data)
    (found,) = check_store(store).faults
    assert found.place == key and fault in found.fault


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"size":', '"site":'),
        ('"digest": "', '"digest": "0'),
        (KEY, OTHER),
        ('"schema_version": 1', '"schema_version": 9'),
    ],
)
def test_a_manifest_that_was_changed_is_named_and_its_files_stay(store: Store, old: str, new: str) -> None:
    place = f"{write(store).ref.uri}/manifest.json"
    text = store.get(place).decode()
    assert old in text
    store.delete(place)
    store.create(place, text.replace(old, new).encode())
    (found,) = check_store(store).faults
    assert found.place == place and place not in found.fault
    assert find_garbage(store, NOW) == [], "what it names is not known"


def test_attempts_that_no_manifest_names_go_and_nothing_else_does(store: Store) -> None:
    kept = write(store)
    before = store.list("")
    loser, orphan = f"{kept.ref.uri}/attemptxxxxx/", f"artifacts/thing/{OTHER}/attemptyyyyy/"
    for folder in (loser, orphan):
        store.create(f"{folder}data.bin", b"12345")
        store.create(f"{folder}deep/er.bin", b"678")
    found = find_garbage(store, NOW)
    assert [(each.what, each.place, each.size) for each in found] == [("attempt", loser, 8), ("attempt", orphan, 8)]
    assert all(remove_garbage(store, each) for each in found)
    assert store.list("") == before
    assert check_store(store).faults == [] and find_garbage(store, NOW) == []


def test_what_is_young_may_have_a_live_writer(store: Store) -> None:
    store.create(f"artifacts/thing/{KEY}/attempt/data.bin", b"1")
    assert find_garbage(store) == []
    assert len(find_garbage(store, NOW)) == 1


def test_the_attempt_of_a_living_writer_stays_whatever_its_age(store: Store) -> None:
    """A clock set forward, or a machine that was suspended, makes every file old."""
    with ArtifactWriter(store, "thing", KEY, parents={}, config={}, code_version="1") as out:
        place = out.open_attempt()
        store.create(f"{place}/part.bin", b"part")
        out.add_stored("part.bin", 4, sha256(b"part"), None)
        assert find_garbage(store, NOW) == []
        assert not remove_garbage(store, Garbage("attempt", f"{place}/", 4, 1e6))
        out.commit()
    assert check_store(store).faults == []


def test_an_attempt_that_was_committed_meanwhile_stays(store: Store) -> None:
    artifact = write(store)
    manifest = f"{artifact.ref.uri}/manifest.json"
    text = store.get(manifest)
    store.delete(manifest)
    (found,) = find_garbage(store, NOW)
    store.create(manifest, text)
    assert not remove_garbage(store, found)
    assert check_store(store).faults == []


def test_attempts_beside_a_damaged_manifest_stay(store: Store) -> None:
    store.create(f"artifacts/thing/{KEY}/attempt/data.bin", b"1")
    store.create(f"artifacts/thing/{KEY}/manifest.json", b"{")
    assert find_garbage(store, NOW) == []


def test_what_a_dead_process_staged_goes_at_once(store: Store) -> None:
    live, dead = store.scratch / f"{STAGE}new", store.scratch / f"{STAGE}000000.1.1.x"
    live.mkdir()
    dead.mkdir()
    (dead / "half").write_bytes(b"1234")
    write(store)
    os.utime(dead, (0, 0))
    (found,) = find_garbage(store, NOW)
    assert (found.what, found.place, found.size) == ("staging", str(dead), 4)
    assert remove_garbage(store, found)
    assert live.exists() and not dead.exists()


def test_an_upload_that_never_ended_is_given_up(tmp_path: Path, request: pytest.FixtureRequest, store: Store) -> None:
    if isinstance(store, LocalStore):
        assert list(store.uploads()) == []
        return
    assert isinstance(store, S3Store)
    s3, bucket = boto3.client("s3"), _bucket(tmp_path)
    name = file_of(write(store), "data.bin")
    for key in (f"some/prefix/{name}", "elsewhere/data.bin"):
        s3.create_multipart_upload(Bucket=bucket, Key=key)
    (found,) = find_garbage(store)  # moto says that every upload began in 2010
    assert (found.what, found.place) == ("upload", name)
    assert find_garbage(store, older_than_s=1e9) == []
    assert remove_garbage(store, found) and remove_garbage(store, found), "asking twice does no harm"
    assert [each["Key"] for each in s3.list_multipart_uploads(Bucket=bucket)["Uploads"]] == ["elsewhere/data.bin"]
    assert find_artifact(store, "thing", KEY) is not None and check_store(store).faults == []


def _bucket(tmp_path: Path) -> str:
    return tmp_path.name.replace("_", "-").lower()[:60].strip("-")
