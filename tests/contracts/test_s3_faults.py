"""On a bad day of the network the S3 store still knows who was first, returns whole objects, and says what is wrong."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from benchmarks.faulty_s3 import Fault, FaultyS3, faulty_s3
from contracts import s3client, s3store, s3write
from contracts.artifacts import ArtifactWriter, find_artifact
from contracts.digests import canonical_json
from contracts.errors import ArtifactCorrupt, ArtifactMissing, StoreError
from contracts.filecache import CACHE_FOLDER, FileCache, cache_base
from contracts.pointers import Pointer
from contracts.store import Store, open_store
from curation.verdicts import Verdict, read_verdict

pytestmark = pytest.mark.slow

KEY = "0" * 64


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"{host}:{port}"
    moto.stop()


@pytest.fixture
def s3(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    monkeypatch.setattr(s3client, "ATTEMPTS", 3)
    with faulty_s3(server) as proxy:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": proxy.endpoint,
            "TRIPLANE_CACHE": str(tmp_path / "cache"),
        }.items():
            monkeypatch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket=_bucket(tmp_path))
        yield proxy


@pytest.fixture
def store(s3: FaultyS3, tmp_path: Path) -> Store:
    opened = open_store(f"s3://{_bucket(tmp_path)}/x")
    opened.create("begun", b"")
    s3.requests.clear()
    return opened


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts as small as S3 allows, so that 12 MiB are a large file."""
    for module in (s3write, s3store):
        monkeypatch.setattr(module, "MULTIPART_BYTES", 6 * 2**20)
    monkeypatch.setattr(s3write, "PART_BYTES", 5 * 2**20)


def test_a_write_whose_answer_was_lost_is_ours(s3: FaultyS3, store: Store) -> None:
    s3.faults.append(Fault("lose_answer", "PUT"))
    assert store.create("a", b"first"), "the client's second try met what its first try wrote"
    assert [method for method, _ in s3.requests] == ["PUT", "PUT", "HEAD"]
    assert not store.create("a", b"second")
    assert store.get("a") == b"first"


def test_a_lost_answer_does_not_turn_a_loser_into_a_winner(s3: FaultyS3, store: Store) -> None:
    store.create("a", b"first")
    s3.faults.append(Fault("lose_answer", "PUT"))
    assert not store.create("a", b"first"), "equal bytes are not a victory: the other writer acted on its own"


def test_a_write_that_ended_without_any_answer_is_looked_for(s3: FaultyS3, store: Store) -> None:
    s3.faults += [Fault("lose_answer", "PUT"), Fault("fail", "PUT", times=9)]
    assert store.create("a", b"first")


def test_a_pointer_that_we_advanced_says_so(s3: FaultyS3, store: Store) -> None:
    pointer = Pointer(store, "live/quickstart")
    s3.faults.append(Fault("lose_answer", "PUT"))
    assert pointer.advance({"policy": "a"}, 0)
    assert not pointer.advance({"policy": "b"}, 0)
    assert [entry.value for entry in pointer.history()] == [{"policy": "a"}]


def test_a_conflict_between_writers_is_tried_again(s3: FaultyS3, store: Store) -> None:
    s3.faults.append(Fault("conflict", "PUT", times=2))
    assert store.create("a", b"first")


def test_an_artifact_survives_faults_at_every_request(s3: FaultyS3, store: Store) -> None:
    s3.faults += [
        Fault("lose_answer", "PUT", "data.bin"),
        Fault("lose_answer", "PUT", "manifest"),
        Fault("fail", "GET"),
    ]
    with ArtifactWriter(store, "thing", KEY, parents={}, config={}, code_version="1") as out:
        out.add_bytes("data.bin", b"hello" * 1000)
        committed = out.commit()
    assert len(store.list("artifacts/")) == 2, "the attempt that won was not swept as a loser's"
    assert committed.path("data.bin").read_bytes() == b"hello" * 1000


def test_a_large_file_goes_in_parts_and_only_once(
    s3: FaultyS3, store: Store, small_parts: None, tmp_path: Path
) -> None:
    source, other = tmp_path / "large", tmp_path / "other"
    source.write_bytes(os.urandom(12 * 2**20))
    other.write_bytes(bytes(12 * 2**20))
    s3.faults += [Fault("lose_answer", "POST", "uploadId"), Fault("fail", "PUT", "partNumber=2")]
    assert store.create_file("large", source)
    assert sum("partNumber" in path for _, path in s3.requests) == 4, "three parts, one of them twice"
    assert not store.create_file("large", other)
    assert store.forget("large"), "an upload leaves its copy in the cache"
    assert store.local_path("large").read_bytes() == source.read_bytes()
    assert "Uploads" not in boto3.client("s3").list_multipart_uploads(Bucket=_bucket(tmp_path)), (
        "the loser's parts are gone"
    )


def test_an_upload_whose_begin_was_answered_in_vain_does_not_stay(
    s3: FaultyS3, store: Store, small_parts: None, tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(os.urandom(12 * 2**20))
    s3.faults.append(Fault("lose_answer", "POST", "uploads"))
    assert store.create_file("large", tmp_path / "large")
    assert sum(path.endswith("uploads") for method, path in s3.requests if method == "POST") == 2
    assert "Uploads" not in boto3.client("s3").list_multipart_uploads(Bucket=_bucket(tmp_path))


@pytest.mark.parametrize("size", [1000, 12 * 2**20])
def test_a_download_that_breaks_off_is_fetched_again(
    s3: FaultyS3, store: Store, small_parts: None, tmp_path: Path, size: int
) -> None:
    data = os.urandom(size)
    store.create("data", data)
    s3.faults.append(Fault("cut_body", "GET", times=2))
    assert store.local_path("data").read_bytes() == data
    if size < 2**20:
        s3.faults.append(Fault("cut_body", "GET", times=2))
        assert store.get("data") == data
    assert list((tmp_path / "cache" / CACHE_FOLDER / "tmp").iterdir()) == []


def test_refused_access_names_what_is_needed(s3: FaultyS3, store: Store) -> None:
    for method, act in (
        ("PUT", lambda: store.create("a", b"")),
        ("GET", lambda: store.get("a")),
        ("HEAD", lambda: store.exists("a")),
    ):
        s3.faults.append(Fault("refuse", method))
        with pytest.raises(StoreError, match=r"refuses access to a \((AccessDenied|403)\): check the credentials"):
            act()


def test_a_server_that_overwrites_is_refused(s3: FaultyS3, tmp_path: Path) -> None:
    s3.faults.append(Fault("unconditional", "PUT", times=99))
    with pytest.raises(StoreError, match="ignores If-None-Match"):
        open_store(f"s3://{_bucket(tmp_path)}/x").create("a", b"")


def test_a_store_that_fails_for_long_is_named(s3: FaultyS3, store: Store) -> None:
    s3.faults.append(Fault("fail", "GET", times=99))
    with pytest.raises(StoreError, match=r"failed on a \(.*SlowDown.*\): check http://127"):
        store.get("a")


def test_a_damaged_copy_in_the_cache_is_fetched_again(store: Store) -> None:
    with ArtifactWriter(store, "thing", KEY, parents={}, config={}, code_version="1") as out:
        out.add_bytes("data.bin", b"honest")
        out.commit()
    artifact = find_artifact(store, "thing", KEY)
    assert artifact is not None
    copy = artifact.path("data.bin")
    copy.chmod(0o644)
    copy.write_bytes(b"torn")
    assert artifact.path("data.bin").read_bytes() == b"honest"


def test_what_was_just_written_is_read_without_asking(s3: FaultyS3, store: Store) -> None:
    assert store.create("verdict", b"solved", cached=True) and not store.create("verdict", b"failed", cached=True)
    s3.requests.clear()
    assert store.local_path("verdict").read_bytes() == b"solved"
    assert s3.requests == []


def test_a_damaged_copy_of_a_verdict_is_fetched_again(store: Store) -> None:
    verdict = Verdict(solved=True, exit="completed", tests=[])
    store.create("verdict", canonical_json(verdict.model_dump()), cached=True)
    copy = store.local_path("verdict")
    copy.chmod(0o644)
    copy.write_bytes(b"{")
    assert read_verdict(store, "verdict") == verdict
    assert read_verdict(store, "none") is None
    store.create("damaged", b"{", cached=True)
    with pytest.raises(ArtifactCorrupt, match=r"verdict damaged in s3://.* is not readable"):
        read_verdict(store, "damaged")


def test_an_object_that_was_deleted_is_not_served_from_the_cache(store: Store, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"1")
    store.create_file("a", tmp_path / "file")
    store.delete("a")
    with pytest.raises(ArtifactMissing):
        store.local_path("a")


def test_the_cache_drops_what_was_unused_for_longest(tmp_path: Path) -> None:
    roomy = FileCache(tmp_path / "cache", "place", 10**6)
    for index, age in enumerate((500, 400, 300, 30)):
        with roomy.fill(f"folder{index}/file") as (partial, path):
            partial.write_bytes(bytes(1000))
        os.utime(path, (time.time() - age,) * 2)
    cache = FileCache(tmp_path / "cache", "place", 3000, keep_s=60)
    assert cache.find("folder0/file") is not None, "used again, thus the youngest"
    cache.sweep()
    assert [cache.find(f"folder{index}/file") is not None for index in range(4)] == [True, False, True, True]
    assert not (tmp_path / "cache" / "place" / "folder1").exists()
    small = FileCache(tmp_path / "cache", "place", 1, keep_s=60)
    small.sweep()
    assert small.find("folder3/file") is not None, "what was just used stays: a process may be about to open it"


def test_the_cache_leaves_other_files_in_its_place_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPLANE_CACHE", str(tmp_path))
    foreign = tmp_path / "datasets" / "corpus"
    foreign.parent.mkdir()
    foreign.write_bytes(bytes(5000))
    os.utime(foreign, (0, 0))
    cache = FileCache(cache_base(), "place", 2000, keep_s=0)
    for index in range(3):
        with cache.fill(f"file{index}") as (partial, _):
            partial.write_bytes(bytes(1000))
    cache.sweep()
    assert foreign.exists()
    assert [cache.find(f"file{index}") is not None for index in range(3)] == [False, True, True]


def test_a_killed_download_is_swept_in_the_end(tmp_path: Path) -> None:
    cache = FileCache(tmp_path / "cache", "place", 1000)
    old, new = (cache.scratch / f"part-{'0' * 12}.7.9.{name}" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"")
    os.utime(old, (0, 0))
    cache.sweep()
    assert list(cache.scratch.iterdir()) == [new]


def test_a_default_cache_that_somebody_else_made_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIPLANE_CACHE", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert cache_base().parent == tmp_path
    stranger = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: stranger)
    with pytest.raises(StoreError, match=f"triplane-cache-{stranger} belongs to another user"):
        cache_base()


def test_many_fill_and_sweep_at_once(tmp_path: Path) -> None:
    def work(worker: int) -> None:
        cache = FileCache(tmp_path / "cache", "place", 20_000, keep_s=0)
        for index in range(60):
            key = f"folder{index % 7}/file{index % 3}"
            if cache.find(key) is None:
                with cache.fill(key) as (partial, _):
                    partial.write_bytes(key.encode() * 100)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    kept = [path for path in (tmp_path / "cache" / "place").rglob("*") if path.is_file()]
    assert all(
        path.read_bytes() == path.relative_to(tmp_path / "cache" / "place").as_posix().encode() * 100 for path in kept
    )
    FileCache(tmp_path / "cache", "place", 20_000, keep_s=0).sweep()
    assert sum(path.stat().st_size for path in kept if path.exists()) <= 20_000


def test_a_folder_swept_while_it_is_made_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mkdir finds the folder, a sweep removes it, and mkdir looks whether it is one."""
    cache, made, swept = FileCache(tmp_path / "cache", "place", 20_000), Path.mkdir, iter(range(3))

    def mkdir(path: Path, *arguments: object, **options: object) -> None:
        if next(swept, None) is not None:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        made(path, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with cache.fill("folder/file") as (partial, target):
        partial.write_bytes(b"content")
    assert target.read_bytes() == b"content"
    (tmp_path / "cache" / "place" / "no folder").write_bytes(b"")
    for key in ("no folder/file", "no folder/deeper/file"):
        with pytest.raises(StoreError, match="is not writable"), cache.fill(key) as (partial, _):
            partial.write_bytes(b"content")


def test_a_cache_bound_that_is_no_number_is_named(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPLANE_CACHE_GB", "20GB")
    with pytest.raises(StoreError, match="TRIPLANE_CACHE_GB='20GB' is not a number"):
        open_store("s3://bucket")


def _bucket(tmp_path: Path) -> str:
    return tmp_path.name.replace("_", "-").lower()[:60]
