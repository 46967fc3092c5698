"""What an agent answers about files, of both agents."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import threading
from contextlib import aclosing
from pathlib import Path

import pytest

from envd.guest.link import Change, ChangeKind, Entry, GuestLink
from envd.guest.protocol import CHUNK
from tests.envd.guests import Guest


def failure(guest: Guest, ask: str, *arguments: object, **options: object) -> int:
    async def job(link: GuestLink) -> int:
        with pytest.raises(OSError) as caught:
            await getattr(link, ask)(*arguments, **options)
        assert (await link.stat(".")).type == "directory"  # the link lives on
        return caught.value.errno or 0

    return guest.run(job)


def test_a_file_comes_back_as_it_was_written(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        entry = await link.write("a/b/c.txt", b"one\ntwo\n", parents=True, mode=0o640)
        assert (entry.path, entry.type, entry.size, entry.mode) == ("a/b/c.txt", "file", 8, 0o640)
        assert await link.read("a/b/c.txt") == (await link.stat("a/b/c.txt"), b"one\ntwo\n")
        assert (await link.read("/workspace/a/b/../b/c.txt", offset=4, at_most=2))[1] == b"tw"
        assert (await link.read("a/b/c.txt", offset=1 << 40))[1] == b""
        assert (await link.write("a/b/c.txt", b"")).mode == 0o640  # kept
        assert (await link.read_all("a/b/c.txt", 0))[1] == b""

    guest.run(job)
    assert [path.name for path in (guest.workspace / "a/b").iterdir()] == ["c.txt"]


def test_a_large_file_goes_in_pieces_and_is_whole(guest: Guest) -> None:
    data = os.urandom(2 * CHUNK + 12345)

    async def job(link: GuestLink) -> None:
        assert (await link.write("big", data)).size == len(data)
        assert (await link.read_all("big", len(data)))[1] == data
        with pytest.raises(OSError) as caught:
            await link.read_all("big", len(data) - 1)
        assert caught.value.errno == errno.EFBIG
        await link.write("exact", data[:CHUNK])
        assert (await link.read_all("exact", CHUNK))[1] == data[:CHUNK]

    guest.run(job)
    assert sorted(path.name for path in guest.workspace.iterdir()) == ["big", "exact"]


def test_a_reader_never_sees_half_of_a_file(guest: Guest) -> None:
    path, sizes, stop = guest.workspace / "f", set(), threading.Event()
    contents = [bytes([65 + n]) * (CHUNK + 70000) for n in range(2)]
    path.write_bytes(contents[0])

    def reader() -> None:
        while not stop.is_set():
            data = path.read_bytes()
            sizes.add((len(data), data[0] == data[-1]))

    async def job(link: GuestLink) -> None:
        for turn in range(20):
            await link.write("f", contents[turn % 2])

    thread = threading.Thread(target=reader)
    thread.start()
    try:
        guest.run(job)
    finally:
        stop.set()
        thread.join()
    assert sizes == {(CHUNK + 70000, True)}


def test_writing_into_place_keeps_links_and_modes(guest: Guest) -> None:
    (guest.workspace / "real").write_text("old and long")
    (guest.workspace / "real").chmod(0o755)
    (guest.workspace / "link").symlink_to("real")
    os.link(guest.workspace / "real", guest.workspace / "hard")

    async def job(link: GuestLink) -> None:
        await link.write("link", b"new", in_place=True)
        assert (await link.stat("link", follow=False)) == (await link.stat("link", follow=False))._replace(
            type="link", target="real"
        )
        assert (await link.stat("link")).mode == 0o755

    guest.run(job)
    assert (guest.workspace / "hard").read_text() == "new" and (guest.workspace / "link").is_symlink()


def test_an_atomic_write_replaces_a_link_and_not_what_it_points_to(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("mine")
    (guest.workspace / "link").symlink_to(tmp_path / "outside")

    async def job(link: GuestLink) -> None:
        await link.write("link", b"theirs")

    guest.run(job)
    assert (tmp_path / "outside").read_text() == "mine"
    assert not (guest.workspace / "link").is_symlink() and (guest.workspace / "link").read_text() == "theirs"


def test_a_file_that_must_be_new_never_replaces_one(guest: Guest) -> None:
    (guest.workspace / "there").write_text("old")
    assert failure(guest, "write", "there", b"new", exclusive=True) == errno.EEXIST
    assert (guest.workspace / "there").read_text() == "old"


@pytest.mark.parametrize(
    ("ask", "path", "code"),
    [
        ("read", "missing", errno.ENOENT),
        ("read", "directory", errno.EISDIR),
        ("read", "fifo", errno.ENXIO),
        ("read", "socket", errno.ENXIO),
        ("read", "f/below", errno.ENOTDIR),
        ("read", "loop", errno.ELOOP),
        ("read", "n" * 300, errno.ENAMETOOLONG),
        ("read", "n/" * 3000, errno.ENAMETOOLONG),
        ("list", "f", errno.ENOTDIR),
        ("remove", "directory", errno.ENOTEMPTY),
        ("mkdir", "directory", errno.EEXIST),
        ("stat", "", None),
    ],
)
def test_what_is_no_regular_file_is_refused_by_its_reason(guest: Guest, ask: str, path: str, code: int | None) -> None:
    root = guest.workspace
    (root / "directory/inside").mkdir(parents=True)
    (root / "f").write_text("x")
    os.mkfifo(root / "fifo")
    (root / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as sock:
        place = os.open(root, os.O_PATH)
        sock.bind(f"/proc/self/fd/{place}/socket")
        os.close(place)
    if code is None:
        assert guest.run(lambda link: link.stat(path)).path == "."
    else:
        assert failure(guest, ask, path) == code


def test_no_path_leads_out_of_the_workspace(guest: Guest, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    root = guest.workspace
    (root / "absolute").symlink_to(tmp_path / "secret")
    (root / "relative").symlink_to("../secret")
    (root / "above").symlink_to("../../../../..")
    (root / "magic").symlink_to("/proc/self/root")
    (root / "fds").symlink_to("/proc/self/fd/0")
    escapes = [
        "../secret",
        str(tmp_path / "secret"),
        "absolute",
        "relative",
        f"above{tmp_path}/secret",
        f"magic{tmp_path}/secret",
        "fds",
        "a/../../secret",
        "/../secret",
        "/proc/self/environ",
        "/etc/passwd",
    ]

    async def job(link: GuestLink) -> None:
        for path in escapes:
            for attempt in (link.read(path), link.read_all(path, 100), link.stat(path)):
                with pytest.raises(OSError):
                    await attempt
            with pytest.raises(OSError):
                await link.move(path + "/x", "taken")
        for path in escapes:  # what is written lands in the workspace, as behind chroot(2), or nowhere
            try:
                await link.write(path, b"broken", in_place=True)
            except OSError:
                continue
        for change in (link.remove(".."), link.mkdir("..")):
            with pytest.raises(OSError):
                await change
        with pytest.raises(OSError):
            await link.remove(".", recursive=True)

    guest.run(job)
    assert (tmp_path / "secret").read_text() == "secret"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scratch", "secret", "workspace"]


def test_a_listing_is_sorted_and_follows_no_link(guest: Guest) -> None:
    root = guest.workspace
    (root / "b/c").mkdir(parents=True)
    (root / "b/c/deep").write_text("x")
    (root / "b.txt").write_text("12")
    (root / ".git").mkdir()
    (root / "é").write_text("")
    (root / "up").symlink_to("..")

    async def job(link: GuestLink) -> tuple[list[Entry], ...]:
        return (
            (await link.list("."))[0],
            (await link.list(".", depth=0, skip_hidden=True))[0],
            (await link.list("b", depth=2))[0],
            (await link.list("", depth=0, files_only=True))[0],
        )

    one, whole, below, files = (tuple(entry.path for entry in found) for found in guest.run(job))
    assert one == (".git", "b", "b.txt", "up", "é")
    assert whole == ("b", "b/c", "b/c/deep", "b.txt", "up", "é")
    assert below == ("b/c", "b/c/deep")
    assert files == ("b/c/deep", "b.txt", "up", "é")


def test_a_long_listing_is_cut_at_its_limit_and_says_so(guest: Guest) -> None:
    for number in range(3000):
        (guest.workspace / f"{number:05}-{'x' * 100}").touch()

    async def job(link: GuestLink) -> None:
        found, cut = await link.list(".")
        assert len(found) == 3000 and not cut
        found, cut = await link.list(".", limit=17)
        assert [entry.path[:5] for entry in found] == [f"{number:05}" for number in range(17)] and cut
        assert await link.list(".", limit=3000) == ((await link.list("."))[0], False)

    guest.run(job)


def test_names_that_are_no_text_are_kept(guest: Guest) -> None:
    name = os.fsdecode(b"bad\xff\xfe")
    (guest.workspace / name).write_text("x")

    async def job(link: GuestLink) -> None:
        assert [entry.path for entry in (await link.list())[0]] == [name]
        assert (await link.read(name))[1] == b"x"
        for wrong in ("a\0b", "\ud800"):
            with pytest.raises(OSError) as caught:
                await link.read(wrong)
            assert caught.value.errno == errno.EINVAL

    guest.run(job)


def test_moving_and_removing(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        await link.mkdir("a/b/c", parents=True)
        assert (await link.mkdir("a/b", parents=True)).type == "directory"
        await link.write("a/b/f", b"1")
        await link.write("g", b"2")
        with pytest.raises(FileExistsError):
            await link.move("g", "a/b/f")
        assert (await link.move("g", "a/b/f", overwrite=True)).path == "a/b/f"
        assert (await link.read("a/b/f"))[1] == b"2"
        assert (await link.move("a", "z")).type == "directory"
        await link.remove("z", recursive=True)
        assert (await link.list())[0] == []

    guest.run(job)


def test_a_deep_tree_is_listed_and_removed(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        await link.shell([("mkdir -p $(printf 'd/%.0s' $(seq 200))", 20)])
        found, _ = await link.list(".", depth=0)
        assert len(found) == 200
        await link.shell([("mkdir -p $(printf 'd/%.0s' $(seq 1200))", 20)])
        try:
            assert len((await link.list(".", depth=0))[0]) == 1200
        except OSError as error:  # an agent may hold a descriptor a directory
            assert error.errno in (errno.ENAMETOOLONG, errno.EMFILE)
        await link.remove("d", recursive=True)

    try:
        guest.run(job)
        assert list(guest.workspace.iterdir()) == []
    finally:  # pytest would give up at its depth
        subprocess.run(["rm", "-rf", str(guest.workspace / "d")])


def test_a_watch_tells_changes_also_in_directories_made_later(guest: Guest) -> None:
    async def job(link: GuestLink) -> set[Change]:
        seen: set[Change] = set()
        async with aclosing(link.watch(".", recursive=True)) as changes:
            assert await anext(changes) == ()
            await link.mkdir("d")
            await link.write("d/f", b"1", in_place=True)
            await link.move("d/f", "g")
            await link.remove("g")
            async for batch in changes:
                seen |= set(batch)
                if Change(ChangeKind.REMOVED, "g") in seen:
                    break
        assert (await link.stat(".")).type == "directory"
        return seen

    seen = guest.run(job)
    wanted = {
        Change(ChangeKind.CREATED, "d"),
        Change(ChangeKind.MOVED_TO, "g"),
        Change(ChangeKind.REMOVED, "g"),
    }
    assert wanted <= seen
    assert {Change(ChangeKind.CREATED, "d/f"), Change(ChangeKind.MOVED_FROM, "d/f")} & seen


def test_a_watch_tells_every_file_of_a_large_tree_that_is_moved_in(guest: Guest, tmp_path: Path) -> None:
    names = {f"tree/{number:03}-{'n' * 40}" for number in range(700)}
    (tmp_path / "tree").mkdir()
    for each in names:
        (tmp_path / each).touch()

    async def job(link: GuestLink) -> None:
        seen: set[str] = set()
        async with aclosing(link.watch(".", recursive=True)) as changes:
            assert await anext(changes) == ()
            (tmp_path / "tree").rename(guest.workspace / "tree")
            while not names <= seen:
                seen |= {change.path for change in await anext(changes)}
        assert (await link.stat("tree")).type == "directory"

    guest.run(job)


def test_file_asks_are_answered_while_a_command_runs(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        running = asyncio.create_task(link.shell([("sleep 30", 40)]))
        await asyncio.sleep(0.2)
        await asyncio.gather(*(link.write(f"f{n}", b"x") for n in range(100)))
        assert len((await link.list())[0]) == 100 and not running.done()
        running.cancel()

    guest.run(job)


@pytest.mark.slow
def test_a_listing_of_very_long_paths_is_cut_before_the_link_is(guest: Guest) -> None:
    below = guest.workspace
    for _ in range(14):
        below = below / ("d" * 250)
        below.mkdir()
    for number in range(6000):
        (below / str(number)).touch()

    async def job(link: GuestLink) -> None:
        found, cut = await link.list(".", depth=0)
        assert cut and 2000 < len(found) < 6000

    guest.run(job)
