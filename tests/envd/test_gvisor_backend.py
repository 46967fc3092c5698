"""gVisor sandboxes: what they are, what holds them, and that nothing is left of them."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from contracts.owned import owned_directory
from envd.backends.base import IsolationLevel, NetworkRule
from envd.backends.gvisor.backend import find_runsc, start
from envd.backends.gvisor.boxes import GVisorBox
from envd.errors import SandboxGone, SandboxStartError, Unsupported
from envd.guest.link import Change
from envd.native import guest_binary
from envd.sandbox.cgroups import OWNED, box_groups
from envd.types import Limits
from tests.envd.gvisors import COUNTER, FILES, GVisor, make_template, reason_of, require_runsc, shell
from tests.envd.harness import require_limits

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def gvisor() -> Iterator[GVisor]:
    require_runsc()
    with owned_directory(OWNED) as directory:
        running = GVisor(Path(directory))
        yield running
        running.stop()


def processes(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and mark.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def groups_of(server: str) -> list[str]:
    """Control groups of a server's; those of others come and go meanwhile."""
    return [path for path, _, _ in os.walk("/sys/fs/cgroup") if Path(path).name.startswith(server)]


def wait_for(what: str, met: object, patience_s: float = 10.0) -> None:
    assert callable(met)
    deadline = time.monotonic() + patience_s
    while not met():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_the_sandbox_has_a_kernel_of_its_own_and_says_so(gvisor: GVisor) -> None:
    async def job() -> None:
        box = await gvisor.create()
        assert "gVisor" in await shell(box, "dmesg")
        assert (await shell(box, "uname -r")).strip() != platform.release()

    gvisor.run(job)
    features = gvisor.backend.features
    assert (
        features.isolation == IsolationLevel.KERNEL and features.keeps_processes and "disk" in features.limits_enforced
    )


def test_it_sees_its_template_and_what_it_writes_stays_its_own(gvisor: GVisor) -> None:
    async def job() -> None:
        one, other = await gvisor.create(), await gvisor.create()
        assert await shell(one, "cat a.txt sub/b.txt") == "".join(FILES.values())
        await shell(one, "echo mine > a.txt; rm -r sub; echo t > /tmp/t")
        assert (await one.guest.read_all("a.txt", max_bytes=100))[1] == b"mine\n"
        assert await shell(other, "cat a.txt sub/b.txt; ls /tmp") == "".join(FILES.values())

    gvisor.run(job)
    assert {name: (gvisor.template / name).read_text() for name in FILES} == FILES


def test_its_root_has_no_capability_and_owns_nothing_but_its_own_files(gvisor: GVisor) -> None:
    async def job() -> None:
        box = await gvisor.create()
        assert (await shell(box, "id -u; grep CapBnd /proc/self/status")).split() == ["0", "CapBnd:", "0" * 16]
        for path in ("/x", "/usr/x", "/etc/x", "/.template/x", "/.envd/x", "/dev/x", "/dev/net/x"):
            await shell(box, f"! touch {path}; ! unshare -Ur touch {path}")
        await shell(box, "echo x >/dev/null; head -c 8 /dev/urandom >/dev/null; echo x >/dev/shm/x; ls /tmp/x")

    gvisor.run(job)


def test_its_network_is_a_loopback_of_its_own(gvisor: GVisor) -> None:
    connect = "import socket; socket.create_connection(('{}', {}), 3)"

    async def job() -> None:
        listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        box = await gvisor.create()
        assert (await shell(box, "tail -n +3 /proc/net/dev | cut -d: -f1")).split() == ["lo"]
        for host, number in (("127.0.0.1", port), ("169.254.169.254", 80)):
            await shell(box, f'! python3 -c "{connect.format(host, number)}"')
        await shell(box, "python3 -m http.server 8099 >/dev/null 2>&1 & sleep 1")
        await shell(box, f'python3 -c "{connect.format("127.0.0.1", 8099)}"')
        listener.close()

    gvisor.run(job)


def test_a_network_rule_is_refused_rather_than_ignored(gvisor: GVisor) -> None:
    with pytest.raises(Unsupported, match="gives a sandbox no network"):
        gvisor.run(lambda: gvisor.create(network=(NetworkRule("example.org"),)))


def test_environment_and_host_name_are_those_of_the_request(gvisor: GVisor) -> None:
    async def job() -> str:
        box = await gvisor.create(env={"GREETING": "hello"}, host_name="somewhere")
        return await shell(box, "hostname; echo $GREETING; env")

    said = gvisor.run(job)
    assert said.startswith("somewhere\nhello\n")
    assert "TRIPLANE" not in said and "PYTHONPATH" not in said


def test_a_read_only_workspace_can_be_read_only(gvisor: GVisor) -> None:
    async def job() -> None:
        box = await gvisor.create(read_only=True)
        await shell(box, "cat a.txt; ! touch x; ! touch a.txt; touch /tmp/x")

    gvisor.run(job)


def test_disk_and_processes_are_limited_and_the_sandbox_lives_on(gvisor: GVisor) -> None:
    async def job() -> None:
        box = await gvisor.create(limits=Limits(disk_mb=16, pids=24))
        await shell(box, "! head -c 12M /dev/zero > a; ! head -c 12M /dev/zero > /tmp/b; rm -f a /tmp/b")
        began = (
            "import os,time\nn=0\ntry:\n  while n<500 and os.fork(): n+=1\n  else: time.sleep(3)\nexcept OSError:"
            " print(n)"
        )
        await box.guest.write("forks.py", began.encode())
        assert int(await shell(box, "python3 forks.py; sleep 3")) < 24
        assert await shell(box, "echo alive") == "alive\n"

    gvisor.run(job)


def test_memory_is_limited_for_all_of_a_sandbox_and_its_neighbour_lives_on(gvisor: GVisor) -> None:
    require_limits(gvisor.backend.features.limits_enforced, "memory")

    async def job() -> None:
        hog, neighbour = await gvisor.create(limits=Limits(memory_mb=128)), await gvisor.create()
        with pytest.raises(SandboxGone):
            await shell(hog, "python3 -c 'b = bytearray(600 << 20)'")
        assert (await hog.usage()).events["memory"] >= 1
        assert await shell(neighbour, "echo alive") == "alive\n"
        assert 0 < (await neighbour.usage()).memory_bytes < 200 << 20

    gvisor.run(job)


def test_pause_stops_every_process_and_resume_lets_them_go_on(gvisor: GVisor) -> None:
    async def job() -> None:
        box = await gvisor.create()
        await box.guest.start(["bash", "-c", COUNTER])
        await asyncio.sleep(0.5)
        box.guest.hold()
        await box.pause()
        reading = asyncio.ensure_future(box.guest.read_all("count", max_bytes=20))
        done, _ = await asyncio.wait({reading}, timeout=1.0)
        assert not done, "a paused sandbox answered"
        await box.resume()
        box.guest.release()
        before = int((await reading)[1])
        await asyncio.sleep(0.5)
        after = int((await box.guest.read_all("count", max_bytes=20))[1])
        assert before < after < before + 40, "it ran while it was paused"

    gvisor.run(job)


def test_terminals_and_watches_work_on_its_kernel(gvisor: GVisor) -> None:
    async def job() -> None:
        box = await gvisor.create()
        number, _ = await box.guest.start(["bash", "-c", "tty; stty size"], pty=True, rows=30, columns=90)
        await box.guest.wait(number, wait_s=20)
        said = (await box.guest.output(number, 1, 0)).data
        assert b"/dev/pts/" in said and b"30 90" in said
        changes = box.guest.watch("", recursive=True)
        seen = asyncio.ensure_future(_first(changes, "sub/fresh"))
        await asyncio.sleep(0.5)
        await shell(box, "echo x > sub/fresh")
        await asyncio.wait_for(seen, 10)

    gvisor.run(job)


async def _first(changes: AsyncIterator[tuple[Change, ...]], path: str) -> None:
    async for several in changes:
        if path in [change.path for change in several]:
            return


def test_a_pooled_sandbox_is_ready_at_once_and_no_other_than_a_fresh_one() -> None:
    require_runsc()
    with owned_directory(OWNED) as directory:
        gvisor = GVisor(Path(directory), pool=2)

        async def job() -> None:
            who = {"WHO": "one"}
            while gvisor.backend.pool.hits == 0:
                await (await gvisor.create(env=who)).destroy()  # now it knows what is asked for
                await asyncio.sleep(1.0)
            hits = gvisor.backend.pool.hits
            one = await gvisor.create(env=who)
            assert gvisor.backend.pool.hits == hits + 1
            assert await shell(one, "echo $WHO; hostname; cat a.txt; rm a.txt; X=1") == "one\nsandbox\nfirst\n"
            other = await gvisor.create(env=who)
            assert await shell(other, "echo $WHO; cat a.txt; echo $X") == "one\nfirst\n\n"

        gvisor.run(job)
        gvisor.stop()
        assert not processes(directory)


def test_nothing_is_left_of_a_destroyed_sandbox(gvisor: GVisor) -> None:
    async def job() -> GVisorBox:
        box = await gvisor.create()
        await shell(box, "sleep 1000 & setsid sleep 1000 & true")
        await asyncio.gather(box.destroy(), box.destroy())
        await box.destroy()
        with pytest.raises(SandboxGone):
            await box.pause()
        return box

    gvisor.run(job)
    name = f"box-{next(gvisor._names) - 1}"
    own = gvisor.directory / "gvisor"
    assert not processes(f"{own}/boxes/{name}")
    assert not list((own / "boxes").iterdir())
    assert not [path for path in (own / "state").iterdir() if name in path.name]
    assert not [path for path in box_groups(gvisor.backend.stage.groups, name).values() if path.exists()]
    assert str(own) not in Path("/proc/self/mounts").read_text()


def test_nothing_is_left_of_a_sandbox_that_nobody_waited_for(gvisor: GVisor) -> None:
    async def job() -> None:
        for delay_s in (0.0, 0.02, 0.08, 0.15):
            making = asyncio.ensure_future(gvisor.create())
            await asyncio.sleep(delay_s)
            if making.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await making
            else:  # it was quick
                await making.result().destroy()
        await asyncio.sleep(1.0)

    gvisor.run(job)
    own = gvisor.directory / "gvisor"
    wait_for("what a cancelled start began is still there", lambda: not processes(f"--bundle={own}"))
    assert not list((own / "boxes").iterdir())


def test_a_sandbox_that_dies_by_itself_says_so(gvisor: GVisor) -> None:
    async def job() -> None:
        box = await gvisor.create()
        (sentry,) = processes(f"boot\0--apply-caps=false\0--bundle={gvisor.directory}/")
        os.kill(sentry, signal.SIGKILL)
        await box.guest.closed()
        assert box.guest.gone

    gvisor.run(job)


def test_a_template_that_is_not_there_is_told(gvisor: GVisor) -> None:
    async def job() -> None:
        spec = gvisor.spec()
        shutil.rmtree(make_template(gvisor.directory / "templates" / "gone"))
        with pytest.raises(SandboxStartError, match="gone"):
            await gvisor.backend.create(type(spec)(spec.name, "gone", spec.template_dir.with_name("gone"), spec.limits))

    gvisor.run(job)


_SERVER = """
import asyncio, os, sys
from pathlib import Path
from contracts.owned import owned_directory
from envd.sandbox.cgroups import OWNED
from tests.envd.gvisors import GVisor

async def serve(gvisor):
    await gvisor.create()
    await gvisor.create()
    print(gvisor.directory, flush=True)
    await asyncio.sleep(100)

with owned_directory(OWNED) as directory:
    gvisor = GVisor(Path(directory))
    gvisor.run(lambda: serve(gvisor))
"""


def test_a_killed_server_leaves_nothing_that_the_next_one_does_not_remove() -> None:
    require_runsc()
    with owned_directory(OWNED) as other:
        server = subprocess.Popen([sys.executable, "-c", _SERVER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        directory = server.stdout.readline().strip()
        assert len(processes(f"--bundle={directory}")) == 4  # a sandbox and a gofer each
        for pid in processes("envd.backends.gvisor.stage\0"):
            if directory.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)  # and what would have cleaned up after it
        server.kill()
        server.wait()
        try:
            wait_for("processes outlive the server", lambda: not processes(directory))
            next_one = GVisor(Path(other))
            next_one.stop()
            assert not groups_of(Path(directory).name)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def test_a_killed_stage_ends_its_sandboxes_and_the_backend_says_so() -> None:
    require_runsc()
    with owned_directory(OWNED) as directory:
        gvisor = GVisor(Path(directory))

        async def job() -> None:
            box = await gvisor.create()
            for pid in processes("envd.backends.gvisor.stage\0"):
                if str(directory).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
            assert "restart envd" in await gvisor.backend.died()
            await box.guest.closed()
            with pytest.raises((SandboxGone, SandboxStartError)):
                await gvisor.create()

        gvisor.run(job)
        gvisor.stop()
        assert not processes(directory)
        assert not groups_of(Path(directory).name)


def test_without_runsc_the_reason_names_the_installer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "deploy/install-runsc.sh" in reason_of(find_runsc)
    assert (ROOT / "deploy/install-runsc.sh").is_file()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("echo runsc version 0.0~20221219.0", "older than"),
        ("echo nonsense >&2; exit 3", "does not run"),
        (
            '[ "$1" = --version ] && echo runsc version 20991231 || { echo no such platform >&2; exit 1; }',
            "no such platform",
        ),
    ],
)
def test_a_runsc_that_can_not_do_it_is_told_by_its_own_words(said: str, words: str, tmp_path: Path) -> None:
    program = tmp_path / "runsc"
    program.write_text(f"#!/bin/sh\n{said}\n")
    program.chmod(0o755)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    agent = guest_binary()
    assert words in reason_of(lambda: asyncio.run(start(run_dir, runsc=program, agent=agent)))
    assert not list(run_dir.iterdir())


_UNPRIVILEGED = """
import os
from pathlib import Path
from contracts.owned import owned_directory
from envd.sandbox.cgroups import OWNED
from tests.envd.gvisors import GVisor, shell

with owned_directory(OWNED) as directory:
    gvisor = GVisor(Path(directory))

    async def job():
        box = await gvisor.create()
        await shell(box, "X=kept; echo new > a.txt; ! touch /usr/x; sleep 1000 &")
        image = Path(directory) / "image"
        image.mkdir()
        await box.snapshot(image)
        await box.destroy()
        copy = await gvisor.restore(image, host_name="copy")
        print(await shell(copy, "id -u; hostname; echo $X; cat a.txt; jobs"))

    gvisor.run(job)
    print(gvisor.backend.features.limits_enforced)
    gvisor.stop()
print(os.getuid())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_an_ordinary_user_has_it_too_without_limits_of_memory_and_cpu() -> None:
    require_runsc()
    system_python = Path("/usr/bin/python3.11")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    if not system_python.exists() or not packages:
        pytest.skip("needs a Python that an ordinary user may run")
    done = subprocess.run(
        [str(system_python), "-c", _UNPRIVILEGED],
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": ":".join([str(ROOT), *packages])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:4] == ["0", "copy", "kept", "new"] and "sleep 1000" in done.stdout
    assert "('disk', 'pids')" in done.stdout and done.stdout.endswith("65534\n")
