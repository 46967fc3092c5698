from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from envd.client import Limits, ToolCall
from envd.errors import SandboxGone
from envd.operations.client import OperationsClient
from envd.sandbox.python_inside import bin_directory
from tests.envd.harness import FILES, SMALL, Harness, require_limits
from tests.envd.test_verify_unprivileged import closed_above


def python(code: str) -> str:
    return f"python -I -S -c '{code}'"


def test_the_server_says_what_it_isolates(namespaces: Harness, plain: Harness) -> None:
    async def info(client: OperationsClient) -> tuple[str, bool]:
        said = await client.info()
        return said.backend, said.isolation

    assert namespaces.client(info) == ("namespaces", True)
    assert plain.client(info) == ("plain", False)


def test_there_is_no_network_but_loopback(namespaces: Harness) -> None:
    dial = 'import socket; s = socket.socket(); s.settimeout(2); s.connect(("{}", 80))'
    texts = namespaces.shell(
        "ls /sys/class/net 2>/dev/null; cut -d: -f1 /proc/net/dev | tail -n +3 | tr -d ' '",
        python(dial.format("10.0.0.1")),
        python(dial.format("127.0.0.1")),
    )
    assert texts[0] == "lo\nexit 0"
    assert "Network is unreachable" in texts[1]
    assert "Connection refused" in texts[2]


@pytest.mark.parametrize(
    "path", ["/usr/x", "/bin/x", "/etc/passwd", "/x", "/.template/calc.py", "/dev/x", f"{bin_directory()}/x"]
)
def test_the_system_is_read_only(namespaces: Harness, path: str) -> None:
    (text,) = namespaces.shell(f"echo x >> {path}")
    assert text.endswith("exit 1") and ("Read-only" in text or "denied" in text)


def test_host_files_processes_and_mounts_are_out_of_sight(namespaces: Harness, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    texts = namespaces.shell(
        f"cat {tmp_path}/secret",
        "ls /proc | grep -c '^[0-9]'",
        "cat /templates/*; ls /base /mnt /.scratch; cat /etc/shadow",
        "hostname; ls -A /tmp",
        # an ordinary user's server: its process numbers can be listed
        "cat /proc/1/environ; cat /proc/1/fd/0; cat /proc/1/mem",
    )
    assert "No such file" in texts[0]
    assert int(texts[1].split()[0]) <= 5
    assert texts[2].count("No such file") >= 3
    assert texts[3] == "sandbox\n.envd\nexit 0"
    assert texts[4].count("ermission denied") == 3


def test_root_in_a_sandbox_has_no_privileges(namespaces: Harness) -> None:
    texts = namespaces.shell(
        "grep -E 'Cap(Eff|Prm|Bnd)|NoNewPrivs' /proc/self/status",
        "for i in 'mount -t tmpfs x /tmp' 'umount /workspace' 'mknod /tmp/d b 1 1' 'chroot / true' 'hostname x'; do "
        "$i 2>/dev/null && echo did $i; done; true",
        "cat /proc/self/uid_map",
    )
    assert texts[0].split() == [
        "CapPrm:",
        "0" * 16,
        "CapEff:",
        "0" * 16,
        "CapBnd:",
        "0" * 16,
        "NoNewPrivs:",
        "1",
        "exit",
        "0",
    ]
    assert texts[1] == "exit 0"
    if os.geteuid() == 0:
        assert texts[2].split()[1] != "0"


def test_no_descriptor_of_ours_is_inherited(namespaces: Harness) -> None:
    (text,) = namespaces.shell("ls /proc/self/fd | tr '\\n' ' '")
    assert text == "0 1 2 3 \nexit 0"


def test_the_memory_limit_holds(namespaces: Harness) -> None:
    async def job(client: OperationsClient) -> str:
        require_limits((await client.info()).limits_enforced, "memory")
        sandbox = await client.create(await client.put_template(FILES), limits=SMALL)
        try:
            command = python("x = bytearray(400_000_000)")
            return (await sandbox.call(ToolCall("exec", {"command": command}))).text
        except SandboxGone:
            return "exit 137"
        finally:
            await sandbox.close()

    assert "exit 137" in namespaces.client(job)


def test_the_process_limit_holds(namespaces: Harness) -> None:
    bomb = "import os, time\nfor _ in range(100):\n    if os.fork() == 0:\n        time.sleep(30)\n"
    calls = (
        ToolCall("write", {"path": "bomb.py", "content": bomb}),
        ToolCall("exec", {"command": "python -S bomb.py"}),
    )
    assert "Resource temporarily unavailable" in namespaces.calls(*calls, limits=SMALL)[1].text


def test_the_disk_limit_holds_for_the_workspace_and_tmp_together(namespaces: Harness) -> None:
    limits = Limits(disk_mb=8)
    texts = namespaces.shell(
        "head -c 6000000 /dev/zero > /tmp/a; head -c 6000000 /dev/zero > b",
        "rm /tmp/a b; echo x > c && cat c",
        limits=limits,
    )
    assert "No space left" in texts[0]
    assert texts[1] == "x\nexit 0"


def test_neighbours_do_not_see_each_other(namespaces: Harness) -> None:
    async def job(client: OperationsClient) -> str:
        template = await client.put_template(FILES)
        one, two = await client.create(template), await client.create(template)
        command = "echo mine > calc.py; echo mine > /tmp/x; sleep 30 &"
        await one.call(ToolCall("exec", {"command": command}))
        seen = await two.call(ToolCall("exec", {"command": "cat calc.py /tmp/x; ps ax | grep -c '[s]leep'"}))
        for each in (one, two):
            await each.close()
        return seen.text

    assert (
        namespaces.client(job) == "def add(a, b):\n    return a - b\ncat: /tmp/x: No such file or directory\n0\nexit 1"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become somebody else")
def test_it_isolates_for_an_ordinary_user_too() -> None:
    system_python = Path("/usr/bin/python3.11")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    if not system_python.exists() or not packages or closed_above(Path(packages[0])) or closed_above(Path.cwd()):
        pytest.skip("needs a Python and a checkout that an ordinary user may read")
    code = (
        "import asyncio\n"
        "from envd.local import LocalEnvd\n"
        "from envd.client import SandboxClient, ToolCall\n"
        "async def main(address):\n"
        "    async with SandboxClient(address) as client:\n"
        "        sandbox = await client.create(await client.put_template({'a': b'x'}))\n"
        "        result = await sandbox.call(ToolCall('exec', {'command': 'echo y > a; touch /usr/x; id -u'}))\n"
        "        verdict = await client.verify(await client.put_template({}), b'',\n"
        "            {'test_a.py': b'def test_a(): pass'}, ['test_a.py::test_a'])\n"
        "        print(result.text, await sandbox.finish(), verdict.outcomes[0].status)\n"
        "with LocalEnvd('namespaces') as server:\n"
        "    asyncio.run(main(server.address))\n"
    )
    done = subprocess.run(
        [str(system_python), "-c", code],
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
    assert "Read-only" in done.stdout and "+y" in done.stdout and "passed" in done.stdout
