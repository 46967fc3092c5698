"""What gVisor keeps: memory, processes and files over snapshots, in copies that go their own ways."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.owned import owned_directory
from envd.backends.gvisor.backend import start
from envd.backends.gvisor.boxes import GVisorBox
from envd.errors import EnvdError, SandboxStartError
from envd.sandbox.cgroups import OWNED
from envd.types import Limits
from tests.envd.gvisors import COUNTER, GVisor, make_template, require_runsc, shell

pytestmark = pytest.mark.slow
HOLD_MB = 200
ROOMY = Limits(memory_mb=1024)
HOLDER = f"""
import hashlib, os, random, time
data = bytearray(random.Random(7).randbytes(1 << 20)) * {HOLD_MB}
count = 0
while True:
    count += 1
    digest = hashlib.sha256(data).hexdigest() if os.path.exists("ask") else ""
    with open(".held", "w") as file:
        file.write(f"{{count}} {{digest}}")
    os.replace(".held", "held")
    if digest:
        os.replace("held", "answer")
        os.remove("ask")
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def gvisor() -> Iterator[GVisor]:
    require_runsc()
    with owned_directory(OWNED) as directory:
        running = GVisor(Path(directory))
        yield running
        running.stop()


@pytest.fixture
def image(tmp_path: Path) -> Path:
    directory = tmp_path / "image"
    directory.mkdir(mode=0o700)
    return directory


async def counted(box: GVisorBox) -> int:
    return int((await box.guest.read_all("count", max_bytes=20))[1])


async def exists(box: GVisorBox, path: str) -> bool:
    try:
        await box.guest.stat(path)
    except FileNotFoundError:
        return False
    return True


def test_a_copy_has_the_shell_the_processes_and_the_files_of_its_original(gvisor: GVisor, image: Path) -> None:
    async def job() -> None:
        box = await gvisor.create(env={"GREETING": "hello"})
        await shell(box, "cd sub; X=kept; f() { echo $X; }; sleep 1000 & echo new > ../new; rm b.txt")
        number, _ = await box.guest.start(["bash", "-c", COUNTER])
        await asyncio.sleep(0.5)
        assert await box.snapshot(image) == ()
        before = await counted(box)
        copy = await gvisor.restore(image, host_name="copy")
        told = await shell(copy, "hostname; pwd; f; jobs; ls; cat ../new; echo $GREETING")
        assert told.split() == [
            "copy",
            "/workspace/sub",
            "kept",
            "[1]+",
            "Running",
            "sleep",
            "1000",
            "&",
            "new",
            "hello",
        ]
        assert [(each.process, each.running) for each in await copy.guest.processes()] == [(number, True)]
        first = await counted(copy)
        await asyncio.sleep(0.5)
        assert await counted(copy) > first
        assert await counted(box) > before, "the original did not run on"

    gvisor.run(job)


def test_copies_are_independent_with_host_names_and_entropy_of_their_own(gvisor: GVisor, image: Path) -> None:
    async def job() -> None:
        box = await gvisor.create()
        await box.snapshot(image)
        names = [f"copy-{number}" for number in range(3)]
        restoring = (gvisor.restore(image, host_name=name, env={"WHO": name}) for name in names)
        copies = await asyncio.gather(*restoring)
        boxes = [box, *copies]
        random = "import os; print(os.getrandom(16).hex()); print(open('/dev/urandom', 'rb').read(16).hex())"
        drawn = " ".join([await shell(each, f'python3 -c "{random}"') for each in boxes]).split()
        assert len(set(drawn)) == 2 * len(boxes)
        assert [await shell(each, "hostname") for each in boxes] == [f"{name}\n" for name in ("sandbox", *names)]
        for each in copies:
            number, _ = await each.guest.start(["bash", "-c", "echo $WHO >who"])
            await each.guest.wait(number, wait_s=10)
        assert [await shell(each, "cat who") for each in copies] == [f"{name}\n" for name in names]
        await shell(box, "! test -e who")

    gvisor.run(job)


def test_asks_under_way_survive_in_the_original_and_hurt_no_copy(gvisor: GVisor, image: Path) -> None:
    """The snapshot cuts streams wherever they are: polls that wait, a file half sent, an answer half read."""
    content = os.urandom(6 << 20)

    async def job() -> None:
        box = await gvisor.create()
        number, _ = await box.guest.start(["sleep", "2"])
        polls = asyncio.gather(box.guest.wait(number, wait_s=60), shell(box, "sleep 2; echo slept"))

        async def traffic() -> None:
            while True:
                await box.guest.write("big", content)
                assert (await box.guest.read_all("big", max_bytes=8 << 20))[1] == content

        busy = asyncio.ensure_future(traffic())
        await asyncio.sleep(0.3)
        await box.snapshot(image)
        await asyncio.sleep(0.3)
        assert not busy.done()
        busy.cancel()
        copy = await gvisor.restore(image)
        assert await shell(copy, "echo alive") == "alive\n"
        await copy.guest.write("big", content)
        assert (await copy.guest.read_all("big", max_bytes=8 << 20))[1] == content
        state, said = await polls
        assert state.code == 0 and said == "slept\n"

    gvisor.run(job)


def test_an_image_is_restored_by_another_server_after_its_own_has_gone(gvisor: GVisor, image: Path) -> None:
    """Hibernation over a restart, and migration."""
    with owned_directory(OWNED) as directory:
        first = GVisor(Path(directory))

        async def leave() -> None:
            box = await first.create()
            await shell(box, "X=kept; echo file > kept")
            await box.guest.start(["bash", "-c", COUNTER])
            await asyncio.sleep(0.5)
            await box.snapshot(image)
            await box.destroy()

        first.run(leave)
        first.stop()

    async def arrive() -> None:
        box = await gvisor.restore(image)
        assert await shell(box, "echo $X; cat kept") == "kept\nfile\n"
        before = await counted(box)
        await asyncio.sleep(0.5)
        assert await counted(box) > before

    gvisor.run(arrive)


def test_a_copy_can_be_copied_and_is_limited(gvisor: GVisor, image: Path, tmp_path: Path) -> None:
    async def job() -> None:
        box = await gvisor.create(limits=Limits(disk_mb=16))
        await shell(box, "head -c 10M /dev/zero > ten")
        await box.snapshot(image)
        copy = await gvisor.restore(image, limits=Limits(disk_mb=16))
        again = tmp_path / "again"
        again.mkdir()
        await copy.snapshot(again)
        copy_of_copy = await gvisor.restore(again, limits=Limits(disk_mb=16))
        await shell(copy_of_copy, "! head -c 10M /dev/zero > more; rm more; test $(stat -c %s ten) = 10485760")
        assert (await copy_of_copy.usage()).memory_bytes > 10 << 20

    gvisor.run(job)


def test_an_image_that_does_not_fit_here_is_refused_with_the_reason(gvisor: GVisor, image: Path) -> None:
    async def job() -> None:
        box = await gvisor.create()
        await box.snapshot(image)
        await box.destroy()
        manifest = image / "manifest.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"runsc": "runsc 1.0"}))
        with pytest.raises(SandboxStartError, match="another runsc"):
            await gvisor.restore(image)
        manifest.unlink()
        with pytest.raises(SandboxStartError, match="no gvisor snapshot"):
            await gvisor.restore(image)

    gvisor.run(job)


def test_processes_that_ended_are_in_no_snapshot(gvisor: GVisor, image: Path) -> None:
    """85 KB each, where the kernel remembers their names in /proc."""

    async def job() -> None:
        box = await gvisor.create()
        for _ in range(80):
            number, _ = await box.guest.start(["/bin/true"])
            await box.guest.wait(number, wait_s=20)
        await box.snapshot(image)

    gvisor.run(job)
    assert (image / "checkpoint.img").stat().st_size < 4 << 20


def test_a_snapshot_that_can_not_be_written_harms_nothing(gvisor: GVisor, image: Path) -> None:
    (image / "pages.img").mkdir()

    async def job() -> None:
        box = await gvisor.create()
        await shell(box, "X=kept")
        with pytest.raises(EnvdError, match="checkpoint failed"):
            await box.snapshot(image)
        assert await shell(box, "echo $X") == "kept\n"

    gvisor.run(job)


def test_a_damaged_image_starts_nothing_and_leaves_nothing(gvisor: GVisor, image: Path) -> None:
    async def job() -> None:
        box = await gvisor.create()
        await box.snapshot(image)
        await box.destroy()
        state = image / "checkpoint.img"
        state.write_bytes(state.read_bytes()[:-1000])
        with pytest.raises(SandboxStartError):
            await gvisor.restore(image)

    gvisor.run(job)
    assert not list((gvisor.directory / "gvisor" / "boxes").iterdir())


def test_a_python_process_that_holds_200_mb_is_hibernated_resumed_forked_and_migrated(
    gvisor: GVisor, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Its memory and its counter are intact at every step; `times` says how long each took."""
    times: dict[str, float] = {}

    def timed(what: str, since: float) -> float:
        times[what] = round(time.monotonic() - since, 3)
        return time.monotonic()

    async def held(box: GVisorBox) -> tuple[int, str]:
        await box.guest.write("ask", b"")
        while await exists(box, "ask"):
            await asyncio.sleep(0.05)
        count, digest = (await box.guest.read_all("answer", max_bytes=200))[1].split()
        return int(count), digest.decode()

    async def kept(box: GVisorBox, before: tuple[int, str]) -> tuple[int, str]:
        now = await held(box)
        assert now[1] == before[1], "its memory changed"
        assert now[0] > before[0], "it does not count on"
        return now

    async def job() -> None:
        box = await gvisor.create(limits=ROOMY)
        await box.guest.write("hold.py", HOLDER.encode())
        await box.guest.start(["python3", "hold.py"])
        while not await exists(box, "held"):
            await asyncio.sleep(0.1)
        was = await held(box)
        assert (await box.usage()).memory_bytes > HOLD_MB << 20

        images = [tmp_path / name for name in ("hibernated", "forked", "migrated")]
        for image in images:
            image.mkdir()
        since = time.monotonic()
        await box.snapshot(images[0])
        await box.destroy()
        since = timed("hibernate_s", since)
        box = await gvisor.restore(images[0], limits=ROOMY)
        timed("resume_s", since)
        was = await kept(box, was)

        since = time.monotonic()
        await box.snapshot(images[1])
        fork = await gvisor.restore(images[1], limits=ROOMY, host_name="fork")
        timed("fork_s", since)
        await shell(fork, "echo fork > who")
        await kept(fork, was)
        was = await kept(box, was)
        assert not await exists(box, "who")
        await fork.destroy()

        with owned_directory(OWNED) as directory:
            other = await start(Path(directory))
            there = replace(
                gvisor.spec(limits=ROOMY), template_dir=make_template(Path(directory) / "templates" / "some")
            )
            since = time.monotonic()
            await box.snapshot(images[2])
            await box.pause()
            moved = await other.restore(images[2], there)
            await box.destroy()
            timed("migrate_s", since)
            await kept(moved, was)
            await moved.destroy()
            await other.stop()
        times["image_mb"] = round(sum(path.stat().st_size for path in images[0].iterdir()) / (1 << 20), 1)

    gvisor.run(job)
    record_property("times", times)
    print(times)
