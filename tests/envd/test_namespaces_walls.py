"""The namespaces backend on its native spawner: what a sandbox sees, may write and may use up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from envd.backends.base import BoxSpec
from envd.backends.namespaces.backend import NamespacesBackend
from envd.errors import EnvdError, SandboxGone, SandboxStartError
from envd.sandbox.linux import sandbox_owner
from envd.types import Limits
from tests.envd.boxes import FILES, in_sandbox, of_this_run, sh, spec, template, with_namespaces
from tests.envd.harness import closed_above, require_limits


def test_a_sandbox_runs_commands_and_leaves_nothing(run_dir: Path) -> None:
    assert in_sandbox(run_dir, "cat calc.py; echo y > calc.py; cat calc.py; hostname") == ["x = 1\ny\nsandbox\nexit 0"]
    assert (run_dir / "templates/template/calc.py").read_bytes() == FILES["calc.py"]
    assert of_this_run(run_dir) == []


def test_process_1_has_given_up_everything(run_dir: Path) -> None:
    texts = in_sandbox(
        run_dir,
        "for p in 1 self; do grep -hE 'Cap(Inh|Prm|Eff|Bnd|Amb)|NoNewPrivs|Seccomp:' /proc/$p/status; done | sort |"
        " uniq -c",
        "cat /proc/1/environ /proc/1/mem 2>&1 | grep -c 'ermission denied'; cat /proc/1/fd/0 /proc/1/root/x 2>&1 | grep"
        " -c 'ermission denied'",
        "tr '\\0' ' ' < /proc/1/cmdline; cut -d: -f3 /proc/self/cgroup | sort -u; ls -A /.scratch; ls /proc/self/fd |"
        " tr '\\n' ' '",
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
            look = (
                "stat -c '%u %g' . calc.py package /tmp /.template/calc.py | sort -u; echo 2 >> calc.py; stat -c %u"
                " calc.py; cat calc.py"
            )
            assert await sh(box, look) == "0 0\n0\nx = 1\n2\nexit 0"

    with_namespaces(run_dir, job)


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
    works = (
        "mkdir a b && echo 1 > a/f && mv a/f b/f && ln b/f /workspace/g && ln -s g h && cat h && echo 2 > /tmp/t &&"
        " echo 3 > /dev/null && rm -r b"
    )
    terminal = (
        "python3 -S -c 'import os; a, b = os.openpty(); os.write(a, b\"hello\\n\"); print(os.read(b, 9), os.isatty(b))'"
    )
    assert in_sandbox(run_dir, command, works, terminal) == ["exit 0", "1\nexit 0", "b'hello\\n' True\nexit 0"]


def test_a_read_only_workspace_is_read_only(run_dir: Path) -> None:
    (text,) = in_sandbox(run_dir, "cat calc.py; echo y > calc.py; echo z > /tmp/z && cat /tmp/z", read_only=True)
    assert "x = 1" in text and "Read-only file system" in text and text.endswith("z\nexit 0")


def test_limits_hold_and_their_hits_are_counted(run_dir: Path) -> None:
    async def job(backend: NamespacesBackend) -> None:
        require_limits(backend.features.limits_enforced, "memory", "pids")
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

    with_namespaces(run_dir, job)


def test_a_start_that_its_limits_forbid_says_so(run_dir: Path) -> None:
    async def job(backend: NamespacesBackend) -> None:
        with pytest.raises(SandboxStartError, match="could not start"):
            await backend.create(spec(run_dir, host_name="h" * 80))
        with pytest.raises(EnvdError, match="at most 95 bytes"):
            await backend.create(spec(run_dir, host_name="h" * 800))
        with pytest.raises(SandboxStartError, match="is not below"):
            await backend.create(BoxSpec("a", "b", run_dir, Limits()))

    with_namespaces(run_dir, job)
    assert of_this_run(run_dir) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_it_works_for_an_ordinary_user(run_dir: Path) -> None:
    system_python = Path("/usr/bin/python3.11")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    if not system_python.exists() or not packages:
        pytest.skip("needs a Python that an ordinary user may run")
    if any(closed_above(Path(path)) for path in (Path.cwd() / "envd", *packages)):
        pytest.skip("another user can't read the checkout")
    template(run_dir)
    for each in [run_dir, *run_dir.rglob("*")]:
        os.chown(each, 65534, 65534)
    code = (
        "import asyncio, sys; from pathlib import Path; from envd.backends.namespaces import backend as namespaces\n"
        "from envd.backends.base import BoxSpec\nfrom envd.types import Limits\n"
        "async def main(run_dir):\n    backend = await"
        " namespaces.start(run_dir, pool=1)\n    spec = BoxSpec('a', 'template', run_dir / 'templates/template',"
        " Limits())\n    box = await backend.create(spec)\n    (run_dir / 's').mkdir()\n    (r,) = await"
        " box.guest.shell([('id -u; rm calc.py; touch /usr/x; grep -c CapEff:.0000000000000000 /proc/self/status',"
        " 9)])\n    await box.snapshot(run_dir / 's')\n    other = await backend.restore(run_dir / 's', spec)\n    (s,)"
        " = await other.guest.shell([('ls', 9)])\n    print(backend.features.helper, r.head, s.head)\n    await"
        " backend.stop()\nasyncio.run(main(Path(sys.argv[1])))\n"
    )
    done = subprocess.run(
        [str(system_python), "-c", code, str(run_dir)],
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join([str(Path.cwd()), *packages])},
    )
    assert done.returncode == 0, done.stderr
    assert "native" in done.stdout and "Read-only file system" in done.stdout
    assert "b'package\\n'" in done.stdout
