"""The namespaces backend on its native spawner: what a sandbox leaves behind, what of it can be kept, what survives a
death.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from envd.backends.base import BoxSpec
from envd.backends.namespaces.backend import NamespacesBackend
from envd.errors import SandboxGone, SandboxStartError
from envd.types import Limits
from tests.envd.boxes import of_this_run, sh, spec, template, with_namespaces
from tests.envd.harness import require_limits


def test_what_a_quiet_sandbox_leaves_is_used_again_and_what_a_busy_one_leaves_is_not(run_dir: Path) -> None:
    talk = (
        "import socket; a = socket.create_server(('127.0.0.1', 5000)); b = socket.create_connection(('127.0.0.1',"
        " 5000))"
    )

    crowd = "import os, time\ntry:\n  while os.fork(): pass\n  time.sleep(9)\nexcept BlockingIOError: pass\n"

    async def used(backend: NamespacesBackend, command: str) -> tuple[str, str]:
        box = await backend._start(spec(run_dir, Limits(pids=32)))
        before = await box.usage()
        assert before.cpu_s < 5 and not before.events
        network = str(Path(f"/proc/{box._started.pid}/ns/net").readlink())
        said = await sh(box, command)
        assert said.endswith("exit 0"), said
        await box.destroy()
        return box._started.groups, network

    async def job(backend: NamespacesBackend) -> None:
        require_limits(backend.features.limits_enforced, "memory")  # nothing is used again without control groups
        first = await used(backend, "true")
        assert await used(backend, "touch x") == first
        assert await used(backend, f'test ! -e x && python3 -S -c "{talk}"') == first
        group, network = await used(backend, f'python3 -S -c "{talk}"')  # the port is free: it is another's network
        assert group == first[0] and network != first[1]
        paused = await backend._start(spec(run_dir, Limits(pids=32)))
        if "pause" in backend.features.can:
            await paused.pause()
        await paused.destroy()
        if "pids" in backend.features.limits_enforced:
            await used(backend, f"python3 -S -c '{crowd}'")
        assert await used(backend, "test $(ls | wc -l) = 2; ! pgrep sleep")

    with_namespaces(run_dir, job, pool=2)
    assert of_this_run(run_dir) == []


def test_a_paused_sandbox_stands_still_and_goes_on(run_dir: Path) -> None:
    async def job(backend: NamespacesBackend) -> None:
        if "pause" not in backend.features.can:
            pytest.skip("no writable control group v2 here")
        box = await backend.create(spec(run_dir))
        await sh(box, "(while :; do echo x >> n; sleep 0.01; done) & sleep 0.3")
        await box.pause()
        group = box._groups["unified"]
        used = (group / "cpu.stat").read_text().splitlines()[0]
        await asyncio.sleep(0.3)
        assert (group / "cpu.stat").read_text().splitlines()[0] == used
        asked = asyncio.create_task(sh(box, "wc -l < n; sleep 0.3; wc -l < n"))
        await asyncio.sleep(0.1)
        assert not asked.done()
        await box.resume()
        first, second, _ = (await asked).split("\n")
        assert int(second) > int(first) > 0
        await box.pause()
        await box.destroy()  # a frozen one too

    with_namespaces(run_dir, job)


def test_a_snapshot_holds_what_was_changed_and_can_be_restored_twice(run_dir: Path, tmp_path: Path) -> None:
    change = (
        "rm -r package && mkdir package && echo 3 > package/three.py && rm calc.py && ln -s package link && mkfifo pipe"
        " && echo e > 'new\nline' && chmod 640 'new\nline' && mkdir locked && echo l > locked/f && chmod 000 locked &&"
        " echo t > /tmp/t && touch -d @5 old"
    )
    look = (
        "ls -AR --quoting-style=c --time-style=+%s -l | sed 's/^total.*//'; cat package/* /tmp/t; chmod 700 locked; cat"
        " locked/f"
    )

    async def job(backend: NamespacesBackend) -> None:
        box = await backend.create(spec(run_dir))
        assert await sh(box, change) == "exit 0"
        assert await box.snapshot(tmp_path) == ("processes",)
        seen = await sh(box, look)
        one, two = await asyncio.gather(*(backend.restore(tmp_path, spec(run_dir, env={"A": "b"})) for _ in range(2)))
        assert await sh(one, look) == seen
        assert await sh(one, "echo only > mine; ls mine; echo $A; ls /.template") == "mine\nb\ncalc.py\npackage\nexit 0"
        assert await sh(two, look) == seen
        assert (await sh(two, "ls mine")).endswith("exit 2")
        template(run_dir, "other")
        with pytest.raises(SandboxStartError, match="restore it with that one"):
            await backend.restore(tmp_path, BoxSpec("o", "other", run_dir / "templates/other", Limits()))
        (tmp_path / "files.tar").write_bytes(os.urandom(10240))
        with pytest.raises(SandboxStartError, match="can't unpack"):
            await backend.restore(tmp_path, spec(run_dir))

    with_namespaces(run_dir, job)
    assert of_this_run(run_dir) == []


def test_the_pool_hands_out_fresh_sandboxes_with_their_own_environment(run_dir: Path) -> None:
    async def filled(backend: NamespacesBackend) -> int:
        for _ in range(500):
            ready = [len(each) for each in backend.pool._ready.values()]
            if ready == [2]:
                return 2
            await asyncio.sleep(0.01)
        return 0

    async def job(backend: NamespacesBackend) -> None:
        first = await backend.create(spec(run_dir))
        assert await filled(backend) == 2
        waits = next(iter(backend.pool._ready.values()))[0]
        os.kill(waits._started.pid, signal.SIGKILL)  # one of them dies while it waits
        await asyncio.wait_for(waits._started.ended, 10)
        others = [await backend.create(spec(run_dir, env={"WHO": "me"} if n % 2 else {})) for n in range(6)]
        texts = [await sh(box, "echo $WHO $$; ls . /tmp/.envd; touch mine") for box in (first, *others)]
        assert texts == [
            f"{who}2\n.:\ncalc.py\npackage\n\n/tmp/.envd:\nout-1\nexit 0" for who in ("", *("", "me ") * 3)
        ]
        assert len({box._started.number for box in (first, *others)}) == 7
        assert waits not in others and backend.pool.hits > 0

    with_namespaces(run_dir, job, pool=2)
    assert of_this_run(run_dir) == []


def test_sandboxes_end_with_the_spawner_and_the_next_start_sweeps(run_dir: Path) -> None:
    async def job(backend: NamespacesBackend) -> tuple[str, int]:
        box = await backend.create(spec(run_dir))
        await sh(box, "sleep 1000 & setsid sleep 1000 &")
        pid = box._started.pid
        backend.spawner.process.kill()
        reason = await asyncio.wait_for(backend.died(), 10)
        with pytest.raises(SandboxGone):
            await box.usage()
        with pytest.raises(SandboxStartError):
            await backend.create(spec(run_dir))
        await box.destroy()
        return reason, pid

    reason, pid = with_namespaces(run_dir, job)
    assert "spawner" in reason
    for _ in range(500):
        if not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()
    assert of_this_run(run_dir) == []


def test_everything_goes_with_a_server_that_is_killed(run_dir: Path) -> None:
    template(run_dir)
    code = (
        "import asyncio, sys; from pathlib import Path; from envd.backends.namespaces import backend as namespaces\n"
        "from envd.backends.base import BoxSpec\nfrom envd.types import Limits\n"
        "async def main(run_dir):\n    backend = await"
        " namespaces.start(run_dir, pool=2)\n    box = await backend.create(BoxSpec('a', 'template', run_dir /"
        " 'templates/template', Limits()))\n    await box.guest.shell([('sleep 1000 & setsid sleep 1000 & head -c"
        " 9000000 /dev/zero > x', 10)])\n    print(box._started.pid, flush=True)\n    await"
        " asyncio.sleep(1000)\nasyncio.run(main(Path(sys.argv[1])))\n"
    )
    server = subprocess.Popen([sys.executable, "-c", code, str(run_dir)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pid = int(server.stdout.readline())
    server.kill()
    server.communicate()
    for _ in range(1000):
        if not run_dir.exists() and not of_this_run(run_dir):
            break
        time.sleep(0.01)
    assert not run_dir.exists()
    assert of_this_run(run_dir) == []
    assert not Path(f"/proc/{pid}").exists()


def test_many_come_and_go_without_a_trace(run_dir: Path) -> None:
    async def job(backend: NamespacesBackend) -> None:
        def descriptors() -> list[str]:
            folders = Path(f"/proc/{backend.spawner.process.pid}/fd"), Path("/proc/self/fd")
            return sorted(
                f"{folder}/{str(each.readlink()).partition(':')[0]}"
                for folder in folders
                for each in folder.iterdir()
                if each.is_symlink()
            )

        before = Counter(descriptors())  # some may be an earlier test's, and go meanwhile

        async def one(number: int) -> None:
            box = await backend.create(spec(run_dir))
            if number % 3:
                await sh(box, "sleep 100 &")
            if number % 4 == 0:
                os.kill(box._started.pid, signal.SIGKILL)
            if number % 5 == 0:
                box.guest.close()
            await box.destroy()

        for _ in range(4):
            await asyncio.gather(*(one(number) for number in range(25)))
        for name in backend._groups.values():
            assert [each for each in name.parent.joinpath(name.name).iterdir() if each.is_dir()] == []
        assert not Counter(descriptors()) - before

    template(run_dir)
    with_namespaces(run_dir, job)
    assert of_this_run(run_dir) == []
