"""The parts of the VM backends that need no machine."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envd.backends.base import BoxSpec, Runtime
from envd.backends.qemu.machine import Console
from envd.backends.qemu.qmp import Qmp, QmpError
from envd.backends.vm.base_machines import BaseMachine, BaseMachines
from envd.backends.vm.machine import About, Shape, kernel_arguments, read_about, write_about
from envd.backends.vm.media import make_disk
from envd.backends.vm.process import VmmProcess
from envd.backends.vm.sparse import open_written, overlay, write_over
from envd.errors import EnvdError, SandboxGone, SandboxStartError
from envd.images import build, initramfs
from envd.images.packages import ImageError
from envd.types import Limits
from tests.envd.firecracker_server import out_of_ramdisk
from tests.needs import require

PAGE = 4096
SHAPE = Shape(128, 1, 64, 64, False)


def _spec(**changes: object) -> BoxSpec:
    usual: dict[str, object] = {
        "name": "box",
        "template": "t" * 64,
        "template_dir": Path("/nowhere"),
        "limits": Limits(memory_mb=128),
    }
    return BoxSpec(**{**usual, **changes})  # type: ignore[arg-type]


def _sparse(path: Path, pages: dict[int, int], count: int) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    os.ftruncate(fd, count * PAGE)
    for page, value in pages.items():
        os.pwrite(fd, bytes([value]) * PAGE, page * PAGE)
    return fd


_PAGES = st.dictionaries(st.integers(0, 63), st.integers(0, 255), max_size=20)


@settings(max_examples=60, deadline=None)
@given(base=_PAGES, diff=_PAGES)
def test_a_diff_over_a_memory_file_changes_its_written_pages_only(
    tmp_path_factory: pytest.TempPathFactory, base: dict[int, int], diff: dict[int, int]
) -> None:
    directory = tmp_path_factory.mktemp("sparse")
    sources = [_sparse(directory / "base", base, 64), _sparse(directory / "diff", diff, 64)]
    try:
        write_over(directory / "merged", *sources)
    finally:
        for fd in sources:
            os.close(fd)
    merged = (directory / "merged").read_bytes()
    expected = {**base, **diff}
    assert len(merged) == 64 * PAGE
    assert all(merged[page * PAGE : (page + 1) * PAGE] == bytes([expected.get(page, 0)]) * PAGE for page in range(64))


def test_a_copy_of_a_sparse_file_stays_sparse(tmp_path: Path) -> None:
    source = _sparse(tmp_path / "source", {5000: 7}, 10_000)
    target = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT)
    try:
        assert overlay(source, target) < 100 * PAGE
        assert os.fstat(target).st_blocks * 512 < 100 * PAGE and os.fstat(target).st_size == 10_000 * PAGE
    finally:
        os.close(source)
        os.close(target)


def test_what_a_vmm_wrote_is_opened_only_where_it_is_a_file_of_the_size_it_may_have(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(bytes(100))
    for name in ("link", "fifo", "large", "missing"):
        with pytest.raises(EnvdError, match=name):
            open_written(tmp_path, name, 99)
    os.close(open_written(tmp_path, "large", 100))


def test_a_sealed_base_machine_can_be_mapped_and_not_be_written() -> None:
    booted = BaseMachine(PAGE)
    memory, state = booted.raw
    os.write(memory, b"memory")
    os.write(state, b"state")
    booted.seal()
    with booted.opened() as (ours, ours_too):
        for fd in (ours, booted.raw[1]):
            with pytest.raises(PermissionError):
                os.pwrite(fd, b"x", 0)
        writable = os.open(f"/proc/self/fd/{ours}", os.O_RDWR)  # as QEMU opens it
        with pytest.raises(PermissionError):
            os.write(writable, b"x")
        os.close(writable)
        with booted.opened() as (_, another):
            assert os.read(ours_too, 5) == os.read(another, 5) == b"state"
    booted.close()


def test_a_base_machine_is_booted_once_and_the_least_used_are_let_go() -> None:
    class Booted:
        closed = False

        def close(self) -> None:
            self.closed = True

    made: dict[str, list[Booted]] = {}

    async def job() -> None:
        bases: BaseMachines[Booted] = BaseMachines(2 * SHAPE.machine_mb)

        async def get(name: str) -> Booted:
            async def boot() -> Booted:
                await asyncio.sleep(0)
                made.setdefault(name, []).append(Booted())
                return made[name][-1]

            return await bases.get((name, SHAPE), boot)

        assert len({id(each) for each in await asyncio.gather(*(get("a") for _ in range(5)))}) == 1
        await get("b")
        await get("a")
        await get("c")
        assert [made[name][0].closed for name in "abc"] == [False, True, False]

        async def fails() -> Booted:
            raise SandboxStartError("no")

        for _ in range(2):  # a boot that failed is tried again
            with pytest.raises(SandboxStartError):
                await bases.get(("d", SHAPE), fails)
        await get("d")
        await bases.close()
        assert all(each.closed for several in made.values() for each in several)

    asyncio.run(job())
    assert len(made["a"]) == 1


def test_no_base_machine_is_closed_before_its_callers_have_it() -> None:
    class Booted:
        closed = False

        def close(self) -> None:
            self.closed = True

    async def job() -> None:
        bases: BaseMachines[Booted] = BaseMachines(SHAPE.machine_mb)
        gate = asyncio.Event()
        made: list[Booted] = []

        async def boot() -> Booted:
            await gate.wait()
            made.append(Booted())
            return made[-1]

        async def usable(name: str) -> bool:
            return not (await bases.get((name, SHAPE), boot)).closed

        starting = [asyncio.create_task(usable(name)) for name in "aabcdd"]
        await asyncio.sleep(0)
        gate.set()
        assert all(await asyncio.gather(*starting))
        assert [each.closed for each in made].count(False) == 1, "the budget holds once nobody waits"
        await bases.close()

    asyncio.run(job())


def test_the_monitor_takes_answers_by_their_number_and_refusals_by_their_words() -> None:
    async def job() -> None:
        ours, theirs = socket.socketpair()
        qmp = Qmp(ours)
        events: list[str] = []
        qmp.on_event = events.append
        reader, writer = await asyncio.open_connection(sock=theirs)

        def say(**words: object) -> None:
            writer.write(json.dumps(words).encode() + b"\r\n")

        async def heard() -> dict[str, object]:
            return dict(json.loads(await reader.readline()))

        say(QMP={"version": {"qemu": {"major": 7, "minor": 2, "micro": 1}}})
        greeting = asyncio.create_task(qmp.greet(5))
        say(**{"return": {}, "id": (await heard())["id"]})
        assert await greeting == "7.2.1"

        given_up = asyncio.create_task(qmp.run("stop"))
        first = await heard()
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        asked = asyncio.create_task(qmp.run("query-status"))
        second = await heard()
        say(**{"return": "stopped", "id": first["id"]})
        say(event="STOP")
        say(**{"return": "status", "id": second["id"]})
        assert await asked == "status" and events == ["STOP"]

        refused = asyncio.create_task(qmp.run("cont"))
        say(
            error={"class": "GenericError", "desc": "Resetting the Virtual Machine is required"},
            id=(await heard())["id"],
        )
        with pytest.raises(QmpError, match="QEMU refused cont: Resetting"):
            await refused

        last = asyncio.create_task(qmp.run("cont"))
        await heard()
        writer.write(b"no json\n")
        with pytest.raises(SandboxGone):
            await last
        await qmp.close()
        writer.close()

    asyncio.run(job())


def test_a_vmm_is_watched_and_what_it_says_is_bounded(tmp_path: Path) -> None:
    async def job() -> None:
        noisy = VmmProcess(["sh", "-c", "yes flood | head -c 1000000; echo last >&2; exit 3"])
        await asyncio.wait_for(noisy.wait(), 20)
        assert noisy.said.endswith("last") and len(noisy.said) <= 4096
        groups = [tmp_path / "memory tasks", tmp_path / "pids"]
        held = VmmProcess(["sh", "-c", 'cat "$@"; echo began; sleep 600', "sh", *map(str, groups)], groups=groups)
        while "began" not in held.said:
            await asyncio.sleep(0.01)
        assert held.said == "0 0 began"
        refused = VmmProcess(["sh", "-c", "echo began"], groups=[tmp_path / "no such group" / "tasks"])
        await asyncio.wait_for(refused.wait(), 5)
        assert "no such group" in refused.said and "began" not in refused.said
        assert held.usage()[0] > 0
        held.kill()
        held.kill()
        await asyncio.wait_for(held.wait(), 5)
        assert held.usage() == (0, 0.0)

    before = len(list(Path("/proc/self/fd").iterdir()))
    asyncio.run(job())
    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_a_console_is_searched_for_limits_wherever_it_is_cut_and_kept_bounded() -> None:
    said = (
        b"[1.0] oom-kill:constraint=CONSTRAINT_NONE\r\n[1.0] Out of memory: Killed process 77 (python3)\r\n"
        b"[2.0] cgroup: fork rejected by pids controller in /sandbox\r\n"
    )
    for step in (1, 7, 64, len(said)):
        console = Console()
        for at in range(0, len(said), step):
            console.feed(said[at : at + step])
        assert console.hits == {"memory": 1, "pids": 1}, step
    console.feed(b"Killed process " * 10_000_000)
    console.feed(b"\nlast")
    assert console.end.endswith("last") and len(console.end) <= 4096
    assert console.hits["memory"] == 2, "a line counts once, whatever a program in the machine writes into it"


def test_a_snapshot_says_what_it_needs(tmp_path: Path) -> None:
    about = About("qemu", "qemu 7.2.1 tcg", "i" * 64, "t" * 64, SHAPE)
    write_about(tmp_path, about)

    def read(**changes: str) -> About:
        here = {"backend": "qemu", "vmm": "qemu 7.2.1 tcg", "image": "i" * 64, **changes}
        return read_about(tmp_path, spec=_spec(), **here)

    assert read() == about
    for name, words in (("backend", "is of the backend"), ("vmm", "was taken by"), ("image", "needs the guest image")):
        with pytest.raises(SandboxStartError, match=words):
            read(**{name: "other"})
    with pytest.raises(SandboxStartError, match="needs the runtime"):
        runtime = Runtime("r" * 64, tmp_path)
        read_about(tmp_path, backend="qemu", vmm="qemu 7.2.1 tcg", image="i" * 64, spec=_spec(runtime=runtime))
    said = json.loads((tmp_path / "machine.json").read_text())
    for broken in (
        {**said, "version": 1},
        {**said, "shape": {**said["shape"], "memory_mb": 1 << 40}},
        {**said, "shape": {}},
        [],
    ):
        (tmp_path / "machine.json").write_text(json.dumps(broken))
        with pytest.raises(SandboxStartError, match="no snapshot of a virtual machine"):
            read()


def test_shapes_beyond_what_machines_can_have_are_refused() -> None:
    assert Shape.of(_spec(limits=Limits(cpu=1.5))).vcpus == 2
    with pytest.raises(SandboxStartError, match="memory_mb=1: "):
        Shape.of(_spec(limits=Limits(memory_mb=1)))
    assert "envd.disk_mb=64 envd.pids=64 envd.read_only=0 envd.stream=serial" in kernel_arguments(SHAPE, "serial")


def test_a_ramdisk_with_an_agent_holds_this_envds_programs(tmp_path: Path) -> None:
    """The kernel unpacks archives one after another: the last file of a name is the one that is there."""
    older = [initramfs.directory("bin"), initramfs.file("init", b"older", 0o755), initramfs.file("odd", b"abc")]
    initramfs.write_archive(tmp_path / "image", older)
    (tmp_path / "agent").write_bytes(b"\x7fELF agent")
    initramfs.with_agent(tmp_path / "image", tmp_path / "agent", tmp_path / "ramdisk")
    assert out_of_ramdisk(tmp_path / "ramdisk", "envd-guest") == b"\x7fELF agent"
    assert out_of_ramdisk(tmp_path / "ramdisk", "init").startswith(b"#!/bin/busybox sh\n")
    assert out_of_ramdisk(tmp_path / "ramdisk", "odd") == b"abc"
    assert (tmp_path / "ramdisk").stat().st_size % 512 == 0


def test_a_template_becomes_the_same_disk_every_time(tmp_path: Path) -> None:
    require("mksquashfs")
    for name in ("one", "two"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep/file").write_text("content\n")
        for path in (tmp_path / name / "deep/file", tmp_path / name / "deep", tmp_path / name):
            os.utime(path, (10**9, 10**9))
    disks = [make_disk(tmp_path / name, tmp_path / f"{name}.squashfs").read_bytes() for name in ("one", "two")]
    assert disks[0] == disks[1]
    with pytest.raises(SandboxStartError, match="mksquashfs can't pack"):
        make_disk(tmp_path / "nothing", tmp_path / "nothing.squashfs")


def test_a_folder_that_is_no_image_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ImageError, match="holds files that are not a guest image"):
        build.build(tmp_path)
    assert (tmp_path / "mine").read_text() == "precious"
    with pytest.raises(ImageError, match=r"envd\.images\.build --out"):
        build.load(tmp_path)
