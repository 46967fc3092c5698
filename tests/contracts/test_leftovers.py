"""What a killed writer left is completed or removed by the next process; what a live one uses is never touched."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import boto3
import pytest

from contracts.artifacts import ArtifactWriter, find_artifact
from contracts.failpoints import KILL_VARIABLE
from contracts.leftovers import sweep_leftovers
from contracts.owned import (
    ABANDONED_S,
    is_abandoned,
    is_leftover,
    owned_directory,
    owned_name,
    remove,
    socket_directory,
)
from contracts.store import Store

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
KEY = "0" * 64
LARGE = 12 * 2**20
PREFIXES = ("stage-", "part-", "")
WRITER = """
import sys
from contracts import s3store, s3write
from contracts.artifacts import ArtifactWriter
from contracts.store import open_store
for module in (s3write, s3store): module.MULTIPART_BYTES = 6 * 2**20
s3write.PART_BYTES = 5 * 2**20
with ArtifactWriter(open_store(sys.argv[1]), "thing", "0" * 64, parents={}, config={}, code_version="1") as out:
    out.add_bytes("data.bin", sys.argv[2].encode() * int(sys.argv[3]))
    out.commit()
"""


def write(store: Store, byte: str, kill_at: str = "", size: int = 100) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WRITER, store.url, byte, str(size)],
        cwd=ROOT,
        env={**os.environ, KILL_VARIABLE: kill_at},
        timeout=60,
    )
    assert done.returncode == (-9 if kill_at else 0)


def left(store: Store) -> list[str]:
    winner = find_artifact(store, "thing", KEY)
    kept = {f"artifacts/thing/{KEY}/manifest.json"}
    if winner is not None:
        kept |= {f"artifacts/thing/{KEY}/{winner.manifest.attempt}/{name}" for name in winner.names()}
    found = [key for key in store.list("artifacts/") if key not in kept]
    return [*found, *(path.name for path in store.scratch.iterdir())]


def uploads(store: Store) -> int:
    if not store.url.startswith("s3:"):
        return 0
    return len(boto3.client("s3").list_multipart_uploads(Bucket=store.url.split("/")[2]).get("Uploads", []))


@pytest.mark.parametrize(
    ("point", "committed"), [("artifact-staged", False), ("before-manifest", True), ("after-manifest", True)]
)
def test_a_killed_attempt_is_completed_or_withdrawn(store: Store, point: str, committed: bool) -> None:
    write(store, "a", kill_at=point)
    assert left(store)
    sweep_leftovers(store)
    found = find_artifact(store, "thing", KEY)
    assert (found is not None) == committed and left(store) == []
    if found is not None:
        assert found.path("data.bin").read_bytes() == b"a" * 100


def test_a_sealed_attempt_whose_files_are_gone_is_not_completed(store: Store) -> None:
    write(store, "a", kill_at="before-manifest")
    (file,) = (key for key in store.list("artifacts/") if key.endswith("data.bin"))
    store.delete(file)
    sweep_leftovers(store)
    assert find_artifact(store, "thing", KEY) is None and left(store) == []


def test_files_of_a_commit_that_failed_are_withdrawn(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    create_file, arrived = store.create_file, []

    def fail_second(key: str, source: Path) -> bool:
        if arrived:
            raise KeyboardInterrupt
        arrived.append(key)
        return create_file(key, source)

    monkeypatch.setattr(store, "create_file", fail_second)
    with pytest.raises(KeyboardInterrupt):
        with ArtifactWriter(store, "thing", KEY, parents={}, config={}, code_version="1") as out:
            out.add_bytes("a.bin", b"a")
            out.add_bytes("b.bin", b"b")
            out.commit()
    assert arrived and left(store) == []


def test_what_lost_against_another_attempt_is_removed(store: Store) -> None:
    write(store, "a", kill_at="before-manifest")
    with ArtifactWriter(store, "thing", KEY, parents={}, config={}, code_version="1") as out:
        out.add_bytes("data.bin", b"b")
        out.commit()
    sweep_leftovers(store)
    found = find_artifact(store, "thing", KEY)
    assert found is not None and found.path("data.bin").read_bytes() == b"b" and left(store) == []


def test_an_upload_in_parts_that_never_ended_is_aborted(store: Store) -> None:
    point = "multipart-under-way:30" if store.url.startswith("s3:") else "artifact-staged"
    write(store, "a", kill_at=point, size=LARGE)
    assert uploads(store) == store.url.startswith("s3:")
    sweep_leftovers(store)
    assert (uploads(store), left(store), find_artifact(store, "thing", KEY)) == (0, [], None)


def test_a_live_writer_and_another_stores_attempt_are_left_alone(store: Store, tmp_path: Path) -> None:
    with ArtifactWriter(store, "thing", KEY, parents={}, config={}, code_version="1") as out:
        out.add_bytes("data.bin", b"b")
        sweep_leftovers(store)
        assert out.commit().path("data.bin").read_bytes() == b"b"
    write(store, "a", kill_at="artifact-staged")
    (stage,) = store.scratch.iterdir()
    note = stage / ".attempt"
    note.write_text(note.read_text().replace(store.url, "s3://elsewhere/x"))
    sweep_leftovers(store)
    assert stage.is_dir(), "only a process that works on that store may remove its files there"
    os.utime(stage, (0, time.time() - ABANDONED_S - 1))
    sweep_leftovers(store)
    assert not stage.exists(), "nobody works there any more, or not by this name"


def test_what_is_a_day_old_goes_whoever_left_it(store: Store) -> None:
    names = [
        f"{prefix}{machine}.7.{start}.a_b1" for machine, start in (("0" * 12, 9), ("unseen", 0)) for prefix in PREFIXES
    ]
    for name in names:
        (store.scratch / name).mkdir()
        os.utime(store.scratch / name, (0, time.time() - ABANDONED_S - 1))
    (store.scratch / f"{names[0]}2").mkdir()
    sweep_leftovers(store)
    assert [path.name for path in store.scratch.iterdir()] == [f"{names[0]}2"]


def test_what_others_keep_in_the_scratch_folder_stays(store: Store) -> None:
    names = ("results", "stage-1", "part-of-a-book.txt", "v1.2.3.tar")
    for name in names:
        (store.scratch / name).mkdir()
        os.utime(store.scratch / name, (0, time.time() - ABANDONED_S - 1))
    sweep_leftovers(store)
    assert {path.name for path in store.scratch.iterdir()} == set(names)


def test_a_name_tells_whether_its_process_lives(tmp_path: Path) -> None:
    code = "from contracts.owned import owned_name; print('x-' + owned_name())"
    dead = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert is_abandoned(dead.strip(), "x-") and not is_abandoned(dead.strip(), "y-") and not is_abandoned(dead.strip())
    assert not is_abandoned(owned_name()) and not is_abandoned("x-tmpab12")
    machine, _, rest = dead.strip().partition(".")
    assert not is_abandoned(f"x-{'0' * 6}.{rest}", "x-"), f"{machine} is not this machine"
    with owned_directory("x-", tmp_path) as mine, tempfile.TemporaryDirectory(dir=tmp_path):
        assert not is_abandoned(Path(mine).name, "x-")


def test_age_never_overrules_a_living_owner() -> None:
    assert not is_leftover(f"x-{owned_name()}", 2 * ABANDONED_S, "x-", "")
    elsewhere = "x-" + "0" * 6 + "." + owned_name().split(".", 1)[1]
    assert is_leftover(elsewhere, 2 * ABANDONED_S, "x-") and not is_leftover(elsewhere, ABANDONED_S / 2, "x-")


def test_a_folder_that_its_owner_has_locked_is_removed_and_what_links_lead_to_stays() -> None:
    folder = Path(tempfile.mkdtemp())
    outside = folder / "outside"
    outside.mkdir(mode=0o500)
    locked = folder / "box" / "cache" / "module"
    locked.mkdir(parents=True)
    (locked / "file").write_text("x")
    (folder / "box" / "link").symlink_to(outside)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 65534, -1, follow_symlinks=False) if os.getuid() == 0 else None
    for path in (locked, locked.parent):
        path.chmod(0)
    child = os.fork()
    if not child:
        if os.getuid() == 0:
            os.setuid(65534)
        remove(folder / "box")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    left = [path.name for path in folder.iterdir()]
    assert (left, stat.S_IMODE(outside.stat().st_mode)) == (["outside"], 0o500)
    shutil.rmtree(folder)


def test_a_sockets_path_fits_whatever_the_temporary_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for parent in (tmp_path, tmp_path / ("x" * 60)):
        parent.mkdir(exist_ok=True)
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        directory = socket_directory("x-", 9)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(directory / "envd.sock"))
        shutil.rmtree(directory)
