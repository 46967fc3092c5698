"""What every backend must do, as coroutines over a backend: test_backend_contract.py runs them on each."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from envd.backends.base import Backend, Box, BoxSpec, Forgets, IsolationLevel, Runtime
from envd.errors import SandboxGone
from envd.sandbox.linux import sandbox_owner
from envd.types import Limits

T = TypeVar("T")
LIMITS = Limits(memory_mb=384, pids=64, disk_mb=32)
COUNTER = """
import os, sys, time, zlib
held = os.urandom(1 << 20) * int(sys.argv[1])
first = zlib.crc32(held)
n = 0
while True:
    n += 1
    whole = zlib.crc32(held) == first if n % 100 == 0 else True
    with open("count.new", "w") as out:
        out.write(f"{n} {first} {os.getpid()} {whole}")
    os.rename("count.new", "count")
    time.sleep(0.02)
"""


@dataclass
class Machines:
    """A backend, the loop it lives in, and a template."""

    runner: asyncio.Runner
    backend: Backend
    directory: Path
    made: int = 0
    boxes: list[Box] = field(default_factory=list)

    def run(self, job: Callable[[Machines], Coroutine[Any, Any, T]]) -> T:
        """Run a test's coroutine and destroy what it left."""

        async def whole() -> T:
            try:
                return await job(self)
            finally:
                for box in self.boxes:
                    await box.destroy()
                self.boxes.clear()

        return self.runner.run(whole())

    def spec(self, **changes: Any) -> BoxSpec:
        """A sandbox of the template that all tests share."""
        self.made += 1
        template = self.directory / "templates/shared"
        if not template.exists():
            (template / "deep").mkdir(parents=True)
            (template / "calc.py").write_text("def add(a, b):\n    return a - b\n")
            (template / "deep/tool.sh").write_text("#!/bin/sh\necho tool\n")
            (template / "deep/tool.sh").chmod(0o755)
            for path in (template, *template.rglob("*")):
                os.chown(path, sandbox_owner(), sandbox_owner())
        usual: dict[str, Any] = {
            "name": f"box{self.made}",
            "template": "a" * 64,
            "template_dir": template,
            "limits": LIMITS,
        }
        return BoxSpec(**{**usual, "host_name": f"host{self.made}", **changes})

    async def create(self, **changes: Any) -> Box:
        """A running sandbox, destroyed at the test's end."""
        return await self.keep(self.backend.create(self.spec(**changes)))

    async def restore(self, snapshot: Path, **changes: Any) -> Box:
        """A sandbox from a snapshot, destroyed at the test's end."""
        return await self.keep(self.backend.restore(snapshot, self.spec(**changes)))

    async def keep(self, making: Awaitable[Box]) -> Box:
        """Remember a box, to destroy it."""
        box = await making
        self.boxes.append(box)
        return box

    def runtime(self, digit: str, *, is_root: bool = False) -> Runtime:
        """A runtime of one module, in a directory of this host."""
        files = self.directory / "runtimes" / (digit * 64)
        files.mkdir(parents=True, exist_ok=True)
        (files / "more.py").write_text(f"name = {digit!r}\n")
        return Runtime(digit * 64, files, is_root)

    def fresh(self, name: str) -> Path:
        """An empty directory."""
        path = self.directory / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return path


async def says(box: Box, command: str, deadline_s: float = 60.0) -> str:
    """What a command of the sandbox's shell wrote."""
    (result,) = await box.guest.shell([(command, deadline_s)])
    return result.head.decode().strip()


async def count(box: Box, after: int = 0) -> tuple[int, str, str]:
    """(number, checksum, pid) of the counting process, once its number is above `after`."""
    for _ in range(600):
        try:
            words = (await box.guest.read("count"))[1].decode().split()
        except FileNotFoundError:
            words = []
        if len(words) == 4 and int(words[0]) > after:
            assert words[3] == "True", "its memory is not what it was"
            return int(words[0]), words[1], words[2]
        await asyncio.sleep(0.1)
    raise AssertionError("nothing counts")


async def start_counter(box: Box, megabytes: int) -> tuple[int, str, str]:
    """Start a Python process that holds so many MiB of random data and counts, in the background of the shell."""
    await box.guest.write("counter.py", COUNTER.encode())
    await says(box, f"python3 counter.py {megabytes} >/dev/null 2>&1 &")
    return await count(box)


async def shows_the_workspace(machines: Machines) -> None:
    box = await machines.create(env={"COLOUR": "blue"})
    shown = await says(box, "cat calc.py; deep/tool.sh; echo $COLOUR; basename $PWD")
    assert shown == "def add(a, b):\n    return a - b\ntool\nblue\nworkspace"
    entry, content = await box.guest.read("calc.py")
    assert content.startswith(b"def add") and entry.mode & 0o777 == 0o644
    await box.guest.write("calc.py", b"new\n")
    assert await says(box, "cat calc.py") == "new"


async def keeps_neighbours_apart(machines: Machines) -> None:
    one, two = await machines.create(), await machines.create()
    await one.guest.write("secret", b"one's\n")
    assert await says(two, "cat secret 2>&1; true") == "cat: secret: No such file or directory"
    assert await says(one, "head -c 16 /dev/urandom | od -An -tx1") != await says(
        two, "head -c 16 /dev/urandom | od -An -tx1"
    )


async def says_what_it_is(machines: Machines, name: str) -> None:
    features = machines.backend.features
    assert machines.backend.name == name and features.helper
    assert set(features.limits_enforced) <= {"memory", "pids", "cpu", "disk"}
    assert features.can <= {"pause", "snapshot", "fork", "migrate", "pty", "network", "runtime", "root"}
    assert features.isolation > IsolationLevel.NONE or name == "plain"
    box = await machines.create()
    usage = await box.usage()
    assert min(usage.memory_bytes, usage.pids, usage.cpu_s, usage.disk_bytes) >= 0
    died = asyncio.ensure_future(machines.backend.died())
    await asyncio.sleep(0.1)
    assert not died.done(), "a backend that works says that it has failed"
    died.cancel()


async def ends(machines: Machines) -> None:
    box, other = await machines.create(), await machines.create()
    await box.destroy()
    await box.destroy()
    with pytest.raises(SandboxGone):
        await says(box, "true")
    assert await says(other, "echo lives") == "lives"


async def keeps_files_in_a_snapshot(machines: Machines) -> None:
    box = await machines.create()
    await says(box, "echo made >deep/made; rm calc.py; ln -s deep link; chmod 700 deep")
    taken = machines.fresh("files")
    kept = () if machines.backend.features.keeps_processes else ("processes",)
    assert await box.snapshot(taken) == kept
    assert await says(box, "echo lives") == "lives", "a snapshot ends its sandbox"
    before = sorted(path.name for path in taken.rglob("*"))
    forks = await asyncio.gather(machines.restore(taken), machines.restore(taken))
    await forks[0].guest.write("deep/made", b"changed\n")
    assert await says(forks[1], "ls; cat link/made; stat -c %a deep") == "deep\nlink\nmade\n700"
    assert sorted(path.name for path in taken.rglob("*")) == before, "a snapshot was changed by its use"


async def forgets_templates(machines: Machines) -> None:
    backend = machines.backend
    await (await machines.create(template="e" * 64)).destroy()
    if isinstance(backend, Forgets):
        await backend.forget("e" * 64)
    assert await says(await machines.create(template="e" * 64), "cat calc.py | head -1") == "def add(a, b):"


async def pauses(machines: Machines) -> None:
    box = await machines.create()
    await start_counter(box, 1)
    await box.pause()
    await box.pause()
    asked = asyncio.create_task(count(box))
    await asyncio.sleep(1.0)
    assert not asked.done(), "a paused machine answered"
    await box.resume()
    await box.resume()
    number, _, _ = await asyncio.wait_for(asked, 60)
    assert number > 0


async def moves_with_its_memory(
    machines: Machines, megabytes: int, elsewhere: Machines | None = None
) -> dict[str, float]:
    """Snapshot a counting process, fork it twice, hibernate and resume it, and take it to another server.

    Returns seconds.
    """
    times: dict[str, float] = {}
    box = await machines.create()
    before, checksum, pid = await start_counter(box, megabytes)
    await says(box, "export KEPT=yes; cd deep; echo file >/workspace/made")
    taken = machines.fresh("taken")

    began = time.monotonic()
    assert await box.snapshot(taken) == ()
    times["snapshot"] = time.monotonic() - began
    began = time.monotonic()
    forks = await asyncio.gather(machines.restore(taken), machines.restore(taken))
    times["two forks"] = time.monotonic() - began
    seen = []
    for fork in (box, *forks):
        number, its_checksum, its_pid = await count(fork, before)
        assert (its_checksum, its_pid) == (checksum, pid), "another process, or another memory"
        assert await says(fork, "echo $KEPT $PWD; cat /workspace/made") == "yes /workspace/deep\nfile"
        seen.append(await says(fork, "head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/hostname"))
        assert abs(int(await says(fork, "date +%s")) - time.time()) < 20
        before = max(before, number)
    assert len(set(seen)) == 3, "copies share their random numbers or names"
    await forks[0].guest.write("made", b"changed\n")
    assert await says(forks[1], "cat /workspace/made") == "file"

    kept = machines.fresh("kept")
    began = time.monotonic()
    await forks[0].snapshot(kept)
    await forks[0].destroy()
    times["hibernate"] = time.monotonic() - began
    began = time.monotonic()
    woken = await machines.restore(kept)
    assert await says(woken, "cat /workspace/made") == "changed"
    times["resume"] = time.monotonic() - began
    number, its_checksum, its_pid = await count(woken)
    assert (its_checksum, its_pid) == (checksum, pid)
    if elsewhere is not None:
        moved = elsewhere.fresh("moved")
        began = time.monotonic()
        await woken.pause()
        await woken.snapshot(moved)
        gone_on = await elsewhere.restore(moved)
        await woken.destroy()
        number, its_checksum, its_pid = await count(gone_on, number)
        times["migrate"] = time.monotonic() - began
        assert (its_checksum, its_pid) == (checksum, pid)
    return times
