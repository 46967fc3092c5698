"""`python -m envd top` against a real server, in a pipe and in a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from envd.client import ToolCall
from envd.local import LocalEnvd
from envd.operations.client import OperationsClient
from envd.operations.top import harmless
from tests.envd.harness import require_limits

pytestmark = pytest.mark.slow

TRICK = "\x1b[2J\x1b]0;owned\x07\u202egnp"
ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "envd", "top"]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A server with three sandboxes: one old and idle, one busy, one with labels that terminals obey."""
    with LocalEnvd("namespaces") as server:

        async def fill() -> None:
            async with OperationsClient(server.address) as client:
                require_limits((await client.info()).backends[0].limits_enforced, "memory")
                template = await client.put_template({"a": b"a\n"})
                await client.create(template, labels={"name": "idle", "team": "x"})
                busy = await client.create(template, labels={"name": "busy", "team": "x"})
                await busy.call(
                    ToolCall(
                        "exec",
                        {"command": "x=$(head -c 9000000 /dev/zero | tr '\\0' y); while :; do :; done & sleep 1"},
                    )
                )
                await client.create(template, labels={"name": TRICK})

        asyncio.run(fill())
        yield server.address


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def names(output: str) -> list[str]:
    return [each["labels"]["name"] for each in json.loads(output)["sandboxes"]]


def test_one_look_as_json_sorted_and_filtered(address: str) -> None:
    assert names(top("--address", address, "--once", "--json").stdout) == ["idle", "busy", TRICK]
    assert names(top("--address", address, "--once", "--json", "--sort", "memory").stdout)[0] == "busy"
    assert names(top("--address", address, "--once", "--json", "--label", "team=x").stdout) == ["idle", "busy"]


def test_the_busy_one_leads_by_processor(address: str) -> None:
    found = json.loads(top("--address", address, "--once", "--json", "--sort", "cpu").stdout)["sandboxes"]
    if not any(each["cpu_s"] for each in found):
        pytest.skip("this machine's backend can't tell what a sandbox uses of the processor")
    assert found[0]["labels"]["name"] == "busy" and found[0]["cpu_percent"] > 5
    assert found[0]["memory_bytes"] > 9_000_000 and found[0]["pids"] >= 2


def test_a_table_holds_no_character_that_a_terminal_obeys(address: str) -> None:
    shown = top("--address", address, "--once")
    assert shown.returncode == 0 and "busy" in shown.stdout and "running" in shown.stdout
    assert not {"\x1b", "\x07", "\u202e"} & set(shown.stdout)
    assert harmless("a\x1b[1m\x9b\u2066b\n") == "a?[1m??b?"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--address", "unix:/tmp/envd-nobody.sock", "--once"],
            "start one with `python -m envd serve --listen unix:/tmp/envd-nobody.sock`",
        ),
        (["--label", "nothing"], "write KEY=VALUE"),
        (["--interval", "0"], "must be above 0"),
        (["--key-file", "/nowhere/key"], "can't be read"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: list[str], words: str) -> None:
    ended = top(*arguments)
    assert ended.returncode == 1 and words in ended.stderr and ended.stderr.count("\n") == 1


@contextmanager
def in_terminal(*arguments: str) -> Iterator[tuple[int, int]]:
    """Run it in a terminal of 24 lines: (pid, the terminal's other end)."""
    pid, fd = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        env = {key: value for key, value in os.environ.items() if key not in ("LINES", "COLUMNS")}
        os.execve(COMMAND[0], [*COMMAND, *arguments], {**env, "TERM": "xterm"})
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    try:
        yield pid, fd
    finally:
        os.close(fd)


def read_until(fd: int, wanted: bytes, limit_s: float = 30) -> bytes:
    os.set_blocking(fd, False)
    said, deadline = b"", time.monotonic() + limit_s
    while wanted not in said and time.monotonic() < deadline:
        try:
            said += os.read(fd, 65536)
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:
            break  # the other end has closed
    return said


def test_in_a_terminal_it_refreshes_and_ctrl_c_puts_the_screen_back(address: str) -> None:
    with in_terminal("--address", address, "--interval", "0.2") as (pid, fd):
        said = read_until(fd, b"busy")
        assert b"\x1b[?1049h" in said and b"busy" in said  # a screen of its own
        assert b"CPU%" in read_until(fd, b"CPU%")  # drawn again
        os.write(fd, b"\x03")
        rest = read_until(fd, b"\x1b[?1049l")
        assert b"\x1b[?1049l" in rest and b"\x1b[?25h" in rest + read_until(fd, b"\x1b[?25h", 5)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0 and b"owned" not in said.replace(b"]0;owned?", b"")


def test_a_server_that_goes_is_one_line_and_the_screen_comes_back() -> None:
    with LocalEnvd("plain") as server:
        with in_terminal("--address", server.address, "--interval", "0.2") as (pid, fd):
            read_until(fd, b"CPU%")
            assert server._process is not None
            server._process.send_signal(signal.SIGKILL)
            said = read_until(fd, b"did not answer", 60)
            assert b"\x1b[?1049l" in said and b"did not answer" in said
            _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 1
