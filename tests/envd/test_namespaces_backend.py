"""The namespaces backend on its native spawner: what a sandbox may, what it leaves behind, what survives a death."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from contracts.owned import owned_name
from envd.backends import namespaces
from envd.backends.base import BoxSpec
from envd.backends.namespaces import NamespacesBackend, NamespacesBox
from envd.errors import EnvdError, SandboxGone, SandboxStartError
from envd.native import spawner_binary
from envd.native.build import build
from envd.sandbox.linux import sandbox_owner
from envd.types import Limits

T = TypeVar("T")
pytestmark = pytest.mark.skipif(
    shutil.which(os.environ.get("CC") or "cc") is None, reason="no C compiler: the native spawner can't be built"
)
FILES = {"calc.py": b"x = 1\n", "package/one.py": b"1\n", "package/two.py": b"2\n"}


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    build()
    assert spawner_binary() is not None


@pytest.fixture
def run_dir() -> Iterator[Path]:
    directory = Path("/tmp", f"envd-{owned_name()}")
    (directory / "templates").mkdir(parents=True)
    directory.chmod(0o711)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def template(run_dir: Path, name: str = "template", files: dict[str, bytes] = FILES) -> Path:
    root = run_dir / "templates" / name
    root.mkdir()
    for path, content in files.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_bytes(content)
    for each in [root, *root.rglob("*")]:
        os.chown(each, sandbox_owner(), sandbox_owner())
    return root


def spec(run_dir: Path, limits: Limits | None = None, **fields: object) -> BoxSpec:
    where = run_dir / "templates/template"
    if not where.exists():
        template(run_dir)
    return BoxSpec("test", "template", where, limits or Limits(), **fields)  # type: ignore[arg-type]


def with_backend(run_dir: Path, job: Callable[[NamespacesBackend], Awaitable[T]], pool: int = 0) -> T:
    async def run() -> T:
        backend = await namespaces.start(run_dir, pool=pool)
        assert isinstance(backend, NamespacesBackend)
        try:
            async with asyncio.timeout(60):
                return await job(backend)
        finally:
            await backend.stop()

    return asyncio.run(run())


async def sh(box: NamespacesBox, command: str, deadline_s: float = 20) -> str:
    (result,) = await box.guest.shell([(command, deadline_s)])
    return result.head.decode(errors="replace") + f"exit {result.code}"


def in_sandbox(run_dir: Path, *commands: str, limits: Limits | None = None, **fields: object) -> list[str]:
    async def job(backend: NamespacesBackend) -> list[str]:
        box = await backend.create(spec(run_dir, limits, **fields))
        try:
            return [await sh(box, command) for command in commands]
        finally:
            await box.destroy()

    return with_backend(run_dir, job)


def of_this_run(run_dir: Path) -> list[str]:
    """Groups and processes that name a run directory."""
    groups = [top for top, _, _ in os.walk("/sys/fs/cgroup") if f"/{run_dir.name}" in top]
    said = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return groups + [line for line in said.splitlines() if run_dir.name in line]


def test_a_sandbox_runs_commands_and_leaves_nothing(run_dir: Path) -> None:
    assert in_sandbox(run_dir, "cat calc.py; echo y > calc.py; cat calc.py; hostname") == ["x = 1\ny\nsandbox\nexit 0"]
    assert (run_dir / "templates/template/calc.py").read_bytes() == FILES["calc.py"]
    assert of_this_run(run_dir) == []


CALLS = """
import ctypes, socket, threading, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    libc.syscall(*[ctypes.c_long(each) for each in arguments])
    return ctypes.get_errno()
def family(*arguments):
    try:
        socket.socket(*arguments).close()
        return 0
    except OSError as error:
        return error.errno
refused = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "keyctl": 250, "add_key": 248, "request_key": 249,
    "bpf": 321, "userfaultfd": 323, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "perf_event_open": 298, "setns": 308,
    "mount": 165, "umount2": 166, "pivot_root": 155, "move_mount": 429, "open_tree": 428, "fsopen": 430, "mount_setattr": 442,
    "kexec_load": 246, "init_module": 175, "finit_module": 313, "open_by_handle_at": 304, "pidfd_getfd": 438, "chroot": 161}
print([name for name, number in refused.items() if call(number, 0, 0, 0, 0, 0) != 1])
print(call(435, 0, 0), call(56, 0x10000000, 0, 0, 0, 0), call(272, 0x10000000), call(272, 0x20000))
print(call(0x40000000 + 39), call(16, 0, 0x5412, 0), call(16, 0, 0x541C, 0))
print([family(*each) for each in ((40, 1), (38, 5), (17, 3), (16, 3, 9), (2, 1, 132), (2, 1, 262))])
print([family(*each) for each in ((1, 1), (2, 1), (2, 2), (10, 1), (16, 3, 0))])
threading.Thread(target=print, args=["thread"]).start()
subprocess.run(["echo", "child"])
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
def test_system_calls_that_no_program_needs_are_refused(run_dir: Path) -> None:
    (text,) = in_sandbox(run_dir, f"cat > /tmp/calls.py <<'END'\n{CALLS}\nEND\npython3 -S -u /tmp/calls.py")
    assert text.splitlines() == [
        "[]",
        "38 1 1 1",
        "38 1 1",
        "[97, 97, 97, 97, 93, 93]",
        "[0, 0, 0, 0, 0]",
        "thread",
        "child",
        "exit 0",
    ]


def test_process_1_has_given_up_everything(run_dir: Path) -> None:
    texts = in_sandbox(
        run_dir,
        "for p in 1 self; do grep -hE 'Cap(Inh|Prm|Eff|Bnd|Amb)|NoNewPrivs|Seccomp:' /proc/$p/status; done | sort | uniq -c",
        "cat /proc/1/environ /proc/1/mem 2>&1 | grep -c 'ermission denied'; ls /proc/1/fd /proc/1/root 2>&1 | grep -c 'ermission denied'",
        "tr '\\0' ' ' < /proc/1/cmdline; cut -d: -f3 /proc/self/cgroup | sort -u; ls -A /.scratch; ls /proc/self/fd | tr '\\n' ' '",
        "cut -d' ' -f2,3 /proc/self/mounts | grep -v ' ext4$'; ls /.scratch; grep -c /templates /proc/self/mountinfo",
    )
    assert {line.split(maxsplit=1)[1] for line in texts[0].splitlines()[:-1]} == {
        *(f"{name}:\t{'0' * 16}" for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")),
        "NoNewPrivs:\t1",
        "Seccomp:\t2",
    }
    assert texts[1] == "2\n2\nexit 0"
    assert texts[2].split() == ["envd-spawn", "/", "0", "1", "2", "3", "exit", "0"]
    assert "/workspace overlay" in texts[3] and "/.scratch" not in texts[3]


def test_no_mount_names_where_the_host_keeps_sandboxes(run_dir: Path) -> None:
    (text,) = in_sandbox(run_dir, "cat /proc/self/mountinfo; echo x > /.template/calc.py; cat /.template/calc.py")
    assert run_dir.name not in text and "templates" not in text
    assert "Read-only file system" in text and text.endswith("x = 1\nexit 0")


def test_sandboxes_of_root_are_users_of_their_own(run_dir: Path) -> None:
    async def job(backend: NamespacesBackend) -> None:
        if "users" not in backend.spawner.walls:
            pytest.skip("not root, or templates are on a file system whose mounts can't be mapped")
        boxes = [await backend.create(spec(run_dir)) for _ in range(2)]
        users = {Path(f"/proc/{box._started.pid}/root/workspace").stat().st_uid for box in boxes}
        assert len(users) == 2 and min(users) > sandbox_owner()
        for box in boxes:
            look = "stat -c '%u %g' . calc.py package /tmp /.template/calc.py | sort -u; echo 2 >> calc.py; stat -c %u calc.py; cat calc.py"
            assert await sh(box, look) == "0 0\n0\nx = 1\n2\nexit 0"

    with_backend(run_dir, job)


def test_refused_system_calls_are_told_by_name_a_few_times_a_second(run_dir: Path) -> None:
    many = "import os, ctypes; libc = ctypes.CDLL(None); [libc.chroot(b'/') for _ in range(3000)]; libc.unshare(0x10000000)"

    async def job(backend: NamespacesBackend) -> None:
        told: list[tuple[str, int]] = []
        box = await backend.create(spec(run_dir))
        box.tell_refusals(lambda call, count: told.append((call, count)))
        assert await sh(box, "ls; git --version >/dev/null") == "calc.py\npackage\nexit 0" and told == []
        assert (await sh(box, "chroot / true")).endswith("exit 125")
        assert told == [("chroot", 1)]
        await asyncio.sleep(1.1)
        assert await sh(box, f'python3 -S -c "{many}"') == "exit 0"
        seconds_at_most = 20
        assert 2 <= len(told) < 4 * seconds_at_most and {call for call, _ in told} <= {"chroot", "unshare"}
        assert sum(count for _, count in told) <= 3002

    with_backend(run_dir, job)


def test_what_a_quiet_sandbox_leaves_is_used_again_and_what_a_busy_one_leaves_is_not(run_dir: Path) -> None:
    talk = "import socket; a = socket.create_server(('127.0.0.1', 5000)); b = socket.create_connection(('127.0.0.1', 5000))"

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

    with_backend(run_dir, job, pool=2)
    assert of_this_run(run_dir) == []


def test_files_outside_workspace_and_tmp_can_not_be_written(run_dir: Path) -> None:
    bad = [
        "/usr/x",
        "/etc/passwd",
        "/x",
        "/.template/calc.py",
        "/dev/x",
        "/.scratch/x",
        "/run/x",
        "/proc/self/comm",
        "/proc/1/comm",
    ]
    command = "for f in " + " ".join(bad) + "; do echo x 2>/dev/null >> $f && echo wrote $f; done 2>/dev/null; true"
    works = "mkdir a b && echo 1 > a/f && mv a/f b/f && ln b/f /workspace/g && ln -s g h && cat h && echo 2 > /tmp/t && echo 3 > /dev/null && rm -r b"
    terminal = (
        "python3 -S -c 'import os; a, b = os.openpty(); os.write(a, b\"hello\\n\"); print(os.read(b, 9), os.isatty(b))'"
    )
    assert in_sandbox(run_dir, command, works, terminal) == ["exit 0", "1\nexit 0", "b'hello\\n' True\nexit 0"]


def test_the_tools_of_the_trade_work_behind_the_walls(run_dir: Path) -> None:
    commands = [
        "git init -q . && git add -A && git -c user.name=a -c user.email=b commit -qm one && git mv calc.py sum.py && git gc -q && git status --short",
        "printf 'def test_it(tmp_path):\\n    (tmp_path / \"f\").write_text(\"x\")\\n' > test_a.py; python -m pytest -q test_a.py | tail -n 1 | cut -d' ' -f1,2",
        "python -c 'import multiprocessing as m; print(m.get_context(\"fork\").Pool(2).map(abs, [-1, -2]))'",
        "printf '#include <stdio.h>\\nint main(void) { puts(\"c\"); }\\n' > a.c && cc a.c -o a && ./a",
    ]
    assert in_sandbox(run_dir, *commands) == [
        "R  calc.py -> sum.py\nexit 0",
        "1 passed\nexit 0",
        "[1, 2]\nexit 0",
        "c\nexit 0",
    ]


def test_a_read_only_workspace_is_read_only(run_dir: Path) -> None:
    (text,) = in_sandbox(run_dir, "cat calc.py; echo y > calc.py; echo z > /tmp/z && cat /tmp/z", read_only=True)
    assert "x = 1" in text and "Read-only file system" in text and text.endswith("z\nexit 0")


def test_limits_hold_and_their_hits_are_counted(run_dir: Path) -> None:
    async def job(backend: NamespacesBackend) -> None:
        if not {"memory", "pids"} <= set(backend.features.limits_enforced):
            pytest.skip("no writable control groups here")
        box = await backend.create(spec(run_dir, Limits(memory_mb=64, pids=16, disk_mb=8)))
        before = await box.usage()
        assert before.memory_bytes > 0 and before.pids >= 1
        assert "137" in await sh(box, "python3 -S -c 'x = bytearray(200_000_000)'")
        assert "Resource temporarily unavailable" in await sh(
            box, "for i in $(seq 40); do sleep 5 & done; kill $(jobs -p)"
        )
        assert "No space left" in await sh(box, "head -c 6000000 /dev/zero > a; head -c 6000000 /dev/zero > /tmp/b")
        after = await box.usage()
        assert after.events["memory"] >= 1 and after.events["pids"] >= 1
        assert 6_000_000 < after.disk_bytes <= 8 * 1024 * 1024 and after.cpu_s > before.cpu_s
        await box.destroy()
        with pytest.raises(SandboxGone):
            await box.usage()

    with_backend(run_dir, job)


def test_a_start_that_its_limits_forbid_says_so(run_dir: Path) -> None:
    async def job(backend: NamespacesBackend) -> None:
        with pytest.raises(SandboxStartError, match="could not start"):
            await backend.create(spec(run_dir, host_name="h" * 80))
        with pytest.raises(EnvdError, match="at most 95 bytes"):
            await backend.create(spec(run_dir, host_name="h" * 800))
        with pytest.raises(SandboxStartError, match="is not below"):
            await backend.create(BoxSpec("a", "b", run_dir, Limits()))

    with_backend(run_dir, job)
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

    with_backend(run_dir, job)


def test_a_snapshot_holds_what_was_changed_and_can_be_restored_twice(run_dir: Path, tmp_path: Path) -> None:
    change = (
        "rm -r package && mkdir package && echo 3 > package/three.py && rm calc.py && ln -s package link && mkfifo pipe && "
        "echo e > 'new\nline' && chmod 640 'new\nline' && mkdir locked && echo l > locked/f && chmod 000 locked && echo t > /tmp/t && touch -d @5 old"
    )
    look = "ls -AR --quoting-style=c --time-style=+%s -l | sed 's/^total.*//'; cat package/* /tmp/t; chmod 700 locked; cat locked/f"

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

    with_backend(run_dir, job)
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

    with_backend(run_dir, job, pool=2)
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

    reason, pid = with_backend(run_dir, job)
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
        "import asyncio, sys; from pathlib import Path; from envd.backends import namespaces; from envd.backends.base import BoxSpec\n"
        "from envd.types import Limits\n"
        "async def main(run_dir):\n"
        "    backend = await namespaces.start(run_dir, pool=2)\n"
        "    box = await backend.create(BoxSpec('a', 'template', run_dir / 'templates/template', Limits()))\n"
        "    await box.guest.shell([('sleep 1000 & setsid sleep 1000 & head -c 9000000 /dev/zero > x', 10)])\n"
        "    print(box._started.pid, flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main(Path(sys.argv[1])))\n"
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
    async def job(backend: NamespacesBackend) -> bool:
        descriptors = Path(f"/proc/{backend.spawner.process.pid}/fd")
        before = len(list(descriptors.iterdir())), len(list(Path("/proc/self/fd").iterdir()))

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
        return before == (len(list(descriptors.iterdir())), len(list(Path("/proc/self/fd").iterdir())))

    template(run_dir)
    assert with_backend(run_dir, job)
    assert of_this_run(run_dir) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_it_works_for_an_ordinary_user(run_dir: Path) -> None:
    system_python = Path("/usr/bin/python3.11")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    if not system_python.exists() or not packages:
        pytest.skip("needs a Python that an ordinary user may run")
    template(run_dir)
    for each in [run_dir, *run_dir.rglob("*")]:
        os.chown(each, 65534, 65534)
    code = (
        "import asyncio, sys; from pathlib import Path; from envd.backends import namespaces; from envd.backends.base import BoxSpec\n"
        "from envd.types import Limits\n"
        "async def main(run_dir):\n"
        "    backend = await namespaces.start(run_dir, pool=1)\n"
        "    spec = BoxSpec('a', 'template', run_dir / 'templates/template', Limits())\n"
        "    box = await backend.create(spec)\n"
        "    (run_dir / 's').mkdir()\n"
        "    (r,) = await box.guest.shell([('id -u; rm calc.py; touch /usr/x; grep -c CapEff:.0000000000000000 /proc/self/status', 9)])\n"
        "    await box.snapshot(run_dir / 's')\n"
        "    other = await backend.restore(run_dir / 's', spec)\n"
        "    (s,) = await other.guest.shell([('ls', 9)])\n"
        "    print(backend.features.helper, r.head, s.head)\n"
        "    await backend.stop()\n"
        "asyncio.run(main(Path(sys.argv[1])))\n"
    )
    done = subprocess.run(
        [str(system_python), "-c", code, str(run_dir)],
        user=65534, group=65534, extra_groups=[], cwd="/", capture_output=True, text=True, timeout=60, check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join([str(Path.cwd()), *packages])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "native" in done.stdout and "Read-only file system" in done.stdout
    assert "b'package\\n'" in done.stdout
