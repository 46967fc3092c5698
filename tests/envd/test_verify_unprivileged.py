"""A server of an ordinary user, without any capability, gives the verdicts that root's gives, and its sandboxes have
the same walls.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from envd.client import ToolCall
from envd.operations.client import OperationsClient
from envd.types import VerifyResult
from tests.envd.harness import TESTS, Harness, closed_above

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="root and setpriv make the user"),
]
UID = 10001
START_S = 90.0
ROOT = Path(__file__).resolve().parents[2]
PYENV = Path(sys.base_prefix)
RIGHT = "def add(a, b):\n    return a + b\n"
CHANGES = {
    "right": {"calc.py": RIGHT},
    "wrong": {},
    "leaves": {"calc.py": "import os\nos._exit(0)\n"},
    "configures": {"conftest.py": "raise SystemExit\n", "calc.py": RIGHT},
    "replaces": {"tests/test_hidden.py": "def test_small(): pass\ndef test_zero(): pass\n"},
    "equals": {"calc.py": "class E(int):\n    def __eq__(self, o): return True\n\ndef add(a, b):\n    return E()\n"},
    "looks around": {"calc.py": f"import os\nprint(os.getuid(), sorted(os.listdir('/')))\n\n\n{RIGHT}"},
}
SHOW_PYTHON = """
set -e
if [ -n "$3" ]; then  # Python's directory is in a home that nobody else may enter: shown alone, at its place
  mkdir -p "$1/python"; mount --bind "$2" "$1/python"
  mount -t tmpfs -o mode=755 tmpfs "$3"; mkdir -p "$2"; mount --bind "$1/python" "$2"
fi
shift 3
"""
CONFINED = f"""{SHOW_PYTHON}
exec setpriv --bounding-set -all --inh-caps -all --no-new-privs --reuid 10001 --regid 10001 --clear-groups "$@"
"""


@contextmanager
def ordinary_user(*options: str, before: str = "") -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A server of an ordinary user, and its socket. before: a command of root in the same mount namespace."""
    if closed_above(ROOT / "envd") or closed_above(Path(sys.prefix)):
        pytest.skip("another user can't read the checkout")
    folder = Path(tempfile.mkdtemp(prefix="triplane-user-"))
    os.chown(folder, UID, UID)
    serve = [sys.executable, "-m", "envd", "serve", "--listen", f"unix:{folder}/s", "--backend", "namespaces"]
    confined = ["unshare", "--mount", "sh", "-c", before + CONFINED, "sh"]
    confined += [str(folder), str(PYENV), closed_above(PYENV)]
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([*confined, *serve, *options], cwd=ROOT, env=environment) as server:
        try:
            yield server, folder / "s"
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
            shutil.rmtree(folder)


@pytest.fixture(scope="module")
def unprivileged() -> Iterator[Harness]:
    with ordinary_user() as (server, socket):
        deadline = time.monotonic() + START_S
        while not socket.exists():
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield Harness(f"unix:{socket}")


def test_what_is_mounted_below_a_system_directory_is_named_where_it_is_in_the_way(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with ordinary_user("--log-level", "error", before="mount -t tmpfs tmpfs /usr/games\n") as (server, _):
        assert server.wait(START_S) == 1
    said = "only root can leave out of /usr what is mounted below it (/usr/games): unmount that"
    assert said in capfd.readouterr().err


def without_time(result: VerifyResult) -> tuple[object, ...]:
    return result.exit, result.outcomes, result.tampering, result.log


@pytest.mark.timeout(300)
def test_verdicts_are_the_same(namespaces: Harness, unprivileged: Harness) -> None:
    for name, changes in CHANGES.items():
        ours, theirs = (without_time(each.verify(changes, tests=TESTS)) for each in (namespaces, unprivileged))
        assert theirs == ours, name


WALLS = """
import ctypes, os, resource, socket
libc, kept = ctypes.CDLL(None, use_errno=True), []
def refused(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return error.errno
print([name for _, name in socket.if_nameindex()][:1])
try:
    while len(kept) < 100:
        kept.append(socket.socket(16, 3, 0))
except OSError as error:
    print(len(kept) <= 32, error.errno)
print([
    refused(resource.prlimit, 1, 7, (1, 1)),
    refused(os.setpriority, 0, 1, 19),
    refused(os.chroot, "/"),
    refused(socket.socketpair, 30, 5),
])
print(refused(os.open, "/etc/new", os.O_CREAT), refused(os.mkdir, "/usr/new"), libc.syscall(500), ctypes.get_errno())
"""


def test_walls_of_its_sandboxes_are_the_same(namespaces: Harness, unprivileged: Harness) -> None:
    async def said(harness: Harness) -> str:
        async with OperationsClient(harness.address) as client:
            template = await client.put_template({"walls.py": WALLS.encode()})
            async with await client.create(template) as sandbox:
                return (await sandbox.call(ToolCall("exec", {"command": "python3 walls.py"}))).text

    ours, theirs = (asyncio.run(said(each)) for each in (namespaces, unprivileged))
    assert theirs == ours == "['lo']\nTrue 105\n[1, 1, 1, 97]\n30 30 -1 38\nexit 0"
