"""The store keeps whole objects or none, never overwrites, and says clearly what is wrong; locally and on S3 alike."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from contracts.artifacts import ArtifactWriter, discard_artifact, find_artifact, list_artifacts, open_artifact
from contracts.errors import ArtifactCorrupt, ArtifactMissing, StoreError
from contracts.pointers import Pointer, PointerEntry
from contracts.s3store import S3Store
from contracts.store import LocalStore, Store, open_store


def write(store: Store, key: str, data: bytes) -> str:
    with ArtifactWriter(store, "thing", key, parents={}, config={"a": 1}, code_version="1") as out:
        out.add_bytes("data.bin", data)
        (out.directory / "time.txt").write_text("now")
        out.add_file("time.txt", telemetry=True)
        return out.commit({"size": len(data)}).ref.digest


def test_create_is_exclusive_and_keeps_the_first_bytes(store: Store) -> None:
    assert store.create("a/b.txt", b"first")
    assert not store.create("a/b.txt", b"second")
    assert store.get("a/b.txt") == b"first"
    assert store.local_path("a/b.txt").read_bytes() == b"first"
    assert store.exists("a/b.txt") and not store.exists("a/c.txt")


def test_a_moved_file_is_stored_once_and_gone(store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"first")
    assert store.create_file("a", source, move=True)
    assert not source.exists() and store.local_path("a").read_bytes() == b"first"
    source.write_bytes(b"second")
    assert not store.create_file("a", source, move=True)
    assert store.get("a") == b"first"


@pytest.mark.parametrize("unmounted", [False, True], ids=["renamed", "unmounted"])
def test_a_store_that_goes_away_is_not_taken_for_an_empty_one(unmounted: bool, tmp_path: Path) -> None:
    place = tmp_path / "store"
    held = LocalStore(place)
    write(held, "k", b"bytes")
    place.rename(tmp_path / "elsewhere")
    if unmounted:
        (place / "tmp").mkdir(parents=True)  # the mount point, in which another process began a store
    for use in (
        lambda: LocalStore(place),
        lambda: held.get("artifacts/thing/k/manifest.json"),
        lambda: Pointer(held, "live/e").current(),
        lambda: held.exists("a"),
        lambda: held.local_path("a"),
        lambda: held.folders("artifacts/"),
        lambda: held.create("a", b""),
        lambda: write(held, "other", b""),
    ):
        with pytest.raises(StoreError, match=r"is gone, or its disk is not mounted any more: bring it back") as error:
            use()
        assert not isinstance(error.value, ArtifactMissing)
    assert not [path for path in place.rglob("*") if path.name != "tmp"]
    if unmounted:
        (place / "tmp").rmdir()
        place.rmdir()
    (tmp_path / "elsewhere").rename(place)
    assert find_artifact(LocalStore(place), "thing", "k") and held.create("a", b"")


def test_list_is_sorted_and_by_prefix(store: Store, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"3")
    store.create("x/2", b"")
    store.create("x/1", b"")
    store.create("xy/1", b"")
    assert store.create_file("z/1", tmp_path / "source")
    assert not store.create_file("z/1", tmp_path / "source")
    assert store.list("x/") == ["x/1", "x/2"]
    assert store.list("x") == ["x/1", "x/2", "xy/1"]
    store.delete("x/1")
    store.delete("x/1")
    assert store.list("x/") == ["x/2"]


def test_folders_are_those_that_hold_a_key_at_any_depth(store: Store) -> None:
    for key in ("x/b/1/2/file", "x/a/file", "x/a/other", "x/file", "xy/c/file"):
        store.create(key, b"")
    assert store.folders("x/") == ["a", "b"]
    assert store.folders("x/b/") == ["1"] and store.folders("nothing/") == store.folders("x/file/") == []
    if isinstance(store, LocalStore):
        (Path(store.url) / "x" / "c" / "left" / "by-a-killed-writer").mkdir(parents=True)
    store.delete("x/b/1/2/file")
    assert store.folders("x/") == ["a"]


def test_missing_key_is_named(store: Store) -> None:
    with pytest.raises(ArtifactMissing, match="nothing/here"):
        store.get("nothing/here")
    with pytest.raises(ArtifactMissing, match="nothing/here"):
        store.local_path("nothing/here")


@pytest.mark.parametrize("key", ["/etc/passwd", "a/../b", "..", "a//b", "", "a b"])
def test_keys_never_climb(store: Store, key: str) -> None:
    with pytest.raises(StoreError, match="store key"):
        store.create(key, b"")


def test_racing_creators_have_one_winner(store: Store) -> None:
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda i=i: results.append(store.create("race", str(i).encode()))) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(results) == 1


def test_pointer_is_compare_and_swap_with_history(store: Store) -> None:
    pointer = Pointer(store, "quickstart/live")
    assert pointer.current() is None
    for number, policy in enumerate("acde"):
        assert pointer.current_of_few() == pointer.current()
        assert all(pointer.current_since(seen) == pointer.current() for seen in range(number + 2))
        assert pointer.advance({"policy": policy}, number)
        assert not pointer.advance({"policy": "b"}, number)
    assert pointer.current_of_few() == pointer.current() == PointerEntry(4, {"policy": "e"})
    assert [(entry.number, entry.value["policy"]) for entry in pointer.history()] == [
        (1, "a"),
        (2, "c"),
        (3, "d"),
        (4, "e"),
    ]


def test_artifact_round_trip_and_second_writer_adopts_the_first(store: Store) -> None:
    first = write(store, "k" * 64, b"hello")
    assert write(store, "k" * 64, b"other") == first
    artifact = find_artifact(store, "thing", "k" * 64)
    assert artifact is not None
    assert artifact.path("data.bin").read_bytes() == b"hello"
    assert (artifact.directory() / "data.bin").read_bytes() == b"hello"
    assert open_artifact(store, artifact.ref).meta == {"size": 5}
    assert [found.ref for found in list_artifacts(store)] == [artifact.ref]
    assert len(store.list("artifacts/")) == 3, "the loser's files are gone"


def test_telemetry_and_key_stay_outside_the_content_digest(store: Store) -> None:
    assert write(store, "1" * 64, b"same") == write(store, "2" * 64, b"same")
    assert write(store, "3" * 64, b"else") != write(store, "1" * 64, b"same")


def test_uncommitted_artifact_does_not_exist(store: Store) -> None:
    with ArtifactWriter(store, "thing", "u" * 64, parents={}, config={}, code_version="1") as out:
        out.add_bytes("data.bin", b"x")
    assert find_artifact(store, "thing", "u" * 64) is None
    assert list(list_artifacts(store)) == []


def test_reference_from_another_store_is_refused(store: Store) -> None:
    write(store, "a" * 64, b"1")
    artifact = find_artifact(store, "thing", "a" * 64)
    assert artifact is not None
    with pytest.raises(ArtifactCorrupt, match="not the requested 000000000000"):
        open_artifact(store, artifact.ref.model_copy(update={"digest": "0" * 64}))
    with pytest.raises(ArtifactMissing, match="materialize thing again"):
        open_artifact(store, artifact.ref.model_copy(update={"key": "0" * 64}))


def test_tampered_file_is_detected(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write(store, "t" * 64, b"honest")
    artifact = find_artifact(store, "thing", "t" * 64)
    assert artifact is not None
    path = store.local_path(f"{artifact.ref.uri}/{artifact.manifest.attempt}/data.bin")
    path.chmod(0o644)
    path.write_bytes(b"forged")
    with pytest.raises(ArtifactCorrupt, match=r"data\.bin does not match"):
        artifact.path("data.bin")


def test_manifest_of_another_key_kind_or_content_is_refused(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write(store, "t" * 64, b"x")
    artifact = find_artifact(store, "thing", "t" * 64)
    assert artifact is not None
    changed = artifact.manifest.model_copy(update={"action_key": "v" * 64, "content_digest": "0" * 64})
    for kind, key, manifest in (
        ("thing", "u" * 64, artifact.manifest),
        ("other", "t" * 64, artifact.manifest),
        ("thing", "v" * 64, changed),
    ):
        store.create(f"artifacts/{kind}/{key}/manifest.json", manifest.model_dump_json().encode())
        with pytest.raises(ArtifactCorrupt, match=r"manifest\.json was changed"):
            find_artifact(store, kind, key)


def test_artifact_whose_removal_is_interrupted_does_not_exist(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write(store, "t" * 64, b"x")
    artifact = find_artifact(store, "thing", "t" * 64)
    assert artifact is not None

    def interrupted(prefix: str) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "discard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        discard_artifact(store, artifact.ref)
    assert find_artifact(store, "thing", "t" * 64) is None


def test_local_store_leaves_no_temporary_files(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    write(store, "t" * 64, b"x")
    store.create("a", b"1")
    store.create("a", b"2")
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("file://data/store", r"names the host 'data': use file:///DIR"),
        ("file:///data/store?x=1", r"write \? as %3F"),
        ("file:///data/store#1", "and # as %23"),
        ("file://[x", "is no location"),
        ("file:///x%00y", "has a null byte"),
        ("~/store", "begins with ~, which only a shell expands: write the whole path"),
        ("file:~/store", "begins with ~"),
    ],
)
def test_location_that_would_be_another_folder_is_refused(where: str, words: str) -> None:
    with pytest.raises(StoreError, match=words):
        open_store(where)


def test_escapes_in_a_file_url_are_decoded(tmp_path: Path) -> None:
    assert open_store(f"file://{tmp_path}/a%20b%3Fc").url == f"{tmp_path}/a b?c"
    assert open_store(f"{tmp_path}/a%20b#c").url == f"{tmp_path}/a%20b#c"


def test_unknown_scheme_and_missing_bucket_say_the_fix(store: Store) -> None:
    with pytest.raises(StoreError, match="unknown scheme 'gs'"):
        open_store("gs://bucket")
    if isinstance(store, S3Store):
        with pytest.raises(StoreError, match="bucket absent-bucket does not exist"):
            open_store("s3://absent-bucket/x").create("a", b"")


def test_a_folder_that_can_not_be_read_is_not_an_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.create("live/a/1.json", b"{}")

    def refuse(path: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StoreError, match="ulimit -n"):
        store.list("live/")
    monkeypatch.undo()
    assert store.list("live/a/1.json/") == store.list("gone/") == []


def test_a_disk_that_fills_while_staging_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with pytest.raises(StoreError, match="is full: free some space"):
        with ArtifactWriter(store, "thing", "f" * 64, parents={}, config={}, code_version="1") as out:
            (out.directory / "data.bin").symlink_to("/dev/full")
            out.add_bytes("data.bin", b"x")
    assert list((tmp_path / "tmp").iterdir()) == []
    assert find_artifact(store, "thing", "f" * 64) is None
