"""Nothing of a server outlives the process that started it, however that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.engines.guarded import SCRATCH
from tests.vllm.conftest import HERE, ROOT

START = """
import sys, time
from pathlib import Path
from inference.engines.config import VllmConfig
from inference.engines.vllm_server import VllmServer
config = VllmConfig(python=sys.executable, env={"PYTHONPATH": sys.argv[2]})
server = VllmServer(config, "cpu", Path(sys.argv[1]))
print(server._guard.pid, flush=True)
time.sleep(600)
"""


def family(root: int) -> list[int]:
    """Living processes below `root`, itself included."""
    found, grown = {root}, True
    while grown:
        grown = False
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                state, parent = entry.read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            pid = int(entry.parent.name)
            if state != "Z" and int(parent) in found and pid not in found:
                found.add(pid)
                grown = True
    return sorted(found)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition: object, seconds: float = 60) -> bool:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A place for temporary files whose path leaves room for sockets."""
    with tempfile.TemporaryDirectory(prefix="v-", dir="/tmp") as folder:
        yield Path(folder)


def start_parent(checkpoint: Path, temporary: Path) -> tuple[subprocess.Popen[str], int]:
    """A process with a server, and the server's guard, once all of the server runs."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "TMPDIR": str(temporary)}
    parent = subprocess.Popen(
        [sys.executable, "-c", START, str(checkpoint), f"{HERE / 'stub'}:{ROOT}:{ROOT / 'kernels'}"],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    guard = int(parent.stdout.readline())
    # guard, server and the server's engine, which is in a session of its own
    assert until(lambda: len(family(guard)) >= 3), "the server did not start"
    return parent, guard


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("victim", ["parent", "server"])
def test_every_process_and_file_of_a_server_goes_with_it(
    victim: str, ending: signal.Signals, policies: tuple[Path, Path], temporary: Path
) -> None:
    parent, guard = start_parent(policies[0], temporary)
    try:
        assert len(list(temporary.glob(f"{SCRATCH}*"))) == 1
        members = family(guard)
        server = next(
            pid for pid in members if b"api_server" in Path(f"/proc/{pid}/cmdline").read_bytes() and pid != guard
        )
        os.kill(parent.pid if victim == "parent" else server, ending)
        assert until(lambda: not any(is_alive(pid) for pid in members)), members
        assert list(temporary.iterdir()) == [], "scratch is removed"
    finally:
        parent.kill()
        parent.wait()


def test_a_guard_that_is_killed_takes_the_server_along(policies: tuple[Path, Path], tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "inference" / "engines" / "server_guard.py"),
        str(os.getpid()),
        str(tmp_path / "x"),
        "5",
        "--",
    ]
    guard = subprocess.Popen([*command, sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.PIPE)
    assert until(lambda: len(family(guard.pid)) == 2)
    server = family(guard.pid)[-1] if family(guard.pid)[-1] != guard.pid else family(guard.pid)[0]
    guard.kill()
    guard.wait()
    assert until(lambda: not is_alive(server))


@pytest.mark.slow
def test_what_a_killed_guard_and_its_killed_parent_left_goes_with_the_next_servers_start(
    policies: tuple[Path, Path], temporary: Path
) -> None:
    living, its_guard = start_parent(policies[0], temporary)
    (spared,) = temporary.glob(f"{SCRATCH}*")
    parent, guard = start_parent(policies[0], temporary)
    members = family(guard)
    (left,) = set(temporary.glob(f"{SCRATCH}*")) - {spared}
    for pid in (parent.pid, guard, *members):  # the parent first, so that no guard sees it gone
        os.kill(pid, signal.SIGSTOP)
    for pid in (guard, parent.pid, *members):
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
    parent.wait()
    assert left.exists()
    try:
        third, third_guard = start_parent(policies[0], temporary)
        third.terminate()
        third.wait()
        assert until(lambda: not is_alive(third_guard))
        assert list(temporary.glob(f"{SCRATCH}*")) == [spared], "that of a living process stays"
    finally:
        members = family(its_guard)
        living.kill()
        living.wait()
        assert until(lambda: not any(is_alive(pid) for pid in members))
