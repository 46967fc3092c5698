"""Tools over an agent's stream give what the pure functions give on a directory, byte for byte."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envd.guest.link import GuestLink
from envd.guest.protocol import MAX_FRAME
from envd.server import textsearch
from envd.server.toolrunner import run_batch
from envd.tools import Output, textfile
from envd.types import ToolCall, ToolResult
from tests.envd.agents import with_agent
from tests.envd.harness import FILES
from tests.envd.local_tools import run_file_tool


@pytest.fixture
def root(tmp_path: Path) -> Path:
    workspace = tmp_path / "workspace"
    for path, content in FILES.items():
        (workspace / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace / path).write_bytes(content)
    return workspace


def odd(root: Path) -> Path:
    """Everything odd that a workspace may hold."""
    (root / "latin").write_bytes(b"caf\xe9 add\nx\n")
    (root / "nul").write_bytes(b"add\0\n")
    (root / "late-nul").write_bytes(b"y" * 40_000 + b"\nadd\0\nadd\n")
    (root / "crlf").write_bytes(b"add\r\nb\r")
    (root / "empty").write_bytes(b"")
    (root / "newlines").write_bytes(b"\n" * 200_000)
    (root / "wide").write_bytes(b"".join(b"add %d " % n + b"w" * 300 + b"\n" for n in range(900)))
    (root / "one-line").write_bytes(b"z" * 300_000)
    (root / "tests-x").write_text("add")
    (root / ".hidden").write_text("add")
    for name in (".git", "__pycache__", "d/.pytest_cache"):
        (root / name).mkdir(parents=True)
        (root / name / "f").write_text("add")
    (root / "d/e/f").mkdir(parents=True)
    (root / "d/e/f/\u00e9 g").write_text("add \u00e9\u4e16")
    os.mkfifo(root / "fifo")
    (root / "link").symlink_to("calc.py")
    (root / "up").symlink_to("..")
    (root / "out").symlink_to("/etc/passwd")
    (root / "loop").symlink_to("loop")
    (root / "to-tests").symlink_to("/tests")
    return root


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments)


PATHS = [
    "calc.py",
    "gone",
    ".",
    "..",
    "/",
    "",
    "tests",
    "tests/",
    "./tests",
    "fifo",
    "link",
    "up",
    "out",
    "loop",
    "to-tests",
]
PATHS += [
    "/workspace/calc.py",
    "/workspace",
    "link/x",
    "calc.py/x",
    "../calc.py",
    "to-tests/test_calc.py",
    "up/calc.py",
]
PATHS += [
    "latin",
    "nul",
    "late-nul",
    "crlf",
    "empty",
    "wide",
    "one-line",
    "newlines",
    "x" * 300,
    "d/" * 3000,
    "\ud800",
    "\udce9",
]
CALLS = [call(name, path=path) for name in ("read", "list") for path in PATHS]
CALLS += [call("search", pattern="add", path=path) for path in PATHS]
PATTERNS = [
    "add",
    r"^def \w+\(",
    "(?=a)a",
    "(",
    "a**",
    "",
    "x$",
    "\u00e9",
    "[^a-z\\s]",
    "(?i)ADD",
    "b|add 1[0-3] ",
    r"\bx\b",
    "\ud800",
    "+",
]
CALLS += [call("search", pattern=pattern) for pattern in PATTERNS]
CALLS += [call("search", pattern="(", path="gone"), call("search", pattern="add", path="\0"), call("search")]
CALLS += [
    call("read", path="wide", start=a, end=b)
    for a, b in ((1, 3), (800, 900), (899, 10**9), (5, 4), (0, 1), (-3, 5), (901, 999))
]
CALLS += [
    call("read", path="newlines", start=a, end=b)
    for a, b in ((1, 199_999), (99_999, 100_003), (200_000, 200_000), (3, 150_000))
]
CALLS += [call("list", depth=depth) for depth in (-1, 0, 1, 2, 3, 99, 10**30)]
CALLS += [call("fly"), call("read"), call("read", path=3), call("edit", path="calc.py", new="x")]
CHANGES = [
    call("edit", path="calc.py", line=2, new="    return a + b\n"),
    call("read", path="calc.py"),
    call("edit", path="calc.py", line=3, new=""),
    call("edit", path="link", old="a + b", new="b + a"),
    call("read", path="calc.py"),
    call("edit", path="latin", line=2, new="\udce8"),
    call("edit", path="latin", old="caf", new="\u00e9"),
    call("edit", path="latin", old="\udce8", new="no"),
    call("edit", path="calc.py", old="a", new="z"),
    call("edit", path="calc.py", old="", new="z"),
    call("edit", path="calc.py", line=1, new="\ud800"),
    call("edit", path="newlines", line=100_000, new="here"),
    call("edit", path="one-line", line=1, new="short"),
    call("search", pattern="here|short"),
    *(call("write", path=path, content="content\n") for path in PATHS),
    call("write", path="new/\u00e9/x.py", content="\udce9\n"),
    call("write", path="new", content=""),
    call("write", path="new/a/../b", content="x"),
    call("write", path="big", content="0123456789abcde\n" * 200_000),
    call("write", path="\ud800", content=""),
    call("write", path="s", content="\ud800"),
    call("list", depth=9),
]


def tree(root: Path) -> dict[str, bytes | str]:
    found: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_symlink():
            found[name] = str(path.readlink())
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def test_every_call_is_answered_as_on_a_directory(root: Path, tmp_path: Path) -> None:
    odd(root)
    shutil.copytree(root, tmp_path / "copy/workspace", symlinks=True, ignore=shutil.ignore_patterns("fifo"))
    copy = tmp_path / "copy/workspace"
    os.mkfifo(copy / "fifo")
    calls = [*CALLS, *CHANGES]

    async def job(guest: GuestLink) -> list[ToolResult]:
        return [(await run_batch(guest, [each], 20))[0] for each in calls]

    for each, result in zip(calls, with_agent(root, job), strict=True):
        assert result == run_file_tool(copy, each), each
    assert tree(root) == tree(copy)


@pytest.mark.slow
def test_without_ripgrep_search_says_the_same(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd(root)
    searches = [each for each in CALLS if each.name == "search"]

    async def job(guest: GuestLink) -> list[ToolResult]:
        return await run_batch(guest, searches, 30)

    with_ripgrep = with_agent(root, job)
    monkeypatch.setattr(textsearch, "PORTABLE", textsearch.re.compile("(?!)"))
    assert with_agent(root, job) == with_ripgrep


def test_a_turn_is_answered_in_order_and_each_call_sees_what_came_before(root: Path) -> None:
    turn = [
        call("read", path="calc.py", start=1, end=1),
        call("list"),
        call("write", path="a", content="1\n"),
        call("exec", command="cat a; echo 2 > b"),
        call("exec", command="true"),
        call("search", pattern="2", path="b"),
        call("read", path="a"),
        call("exec", command="cd tests; X=1"),
        call("fly"),
        call("exec", command="basename $PWD; echo $X"),
        call("exec", command="\ud800"),
    ]

    async def job(guest: GuestLink) -> list[ToolResult]:
        return await run_batch(guest, turn, 10)

    texts = [result.text for result in with_agent(root, job)]
    assert texts == [
        "1 def add(a, b):",
        "calc.py\ntests/\ntests/test_calc.py",
        "ok",
        "1\nexit 0",
        "exit 0",
        "b:1: 2",
        "1 1",
        "exit 0",
        "error: no such tool: fly",
        "tests\n1\nexit 0",
        "error: the tool failed: UnicodeEncodeError",
    ]


@pytest.mark.slow
def test_commands_too_large_for_one_request_run_alone_or_say_so(root: Path) -> None:
    large, larger = "x" * (MAX_FRAME * 2 // 3), "x" * MAX_FRAME
    turn = [
        call("exec", command=f"echo 1 #{large}"),
        call("exec", command=f"echo 2 #{large}"),
        call("exec", command=f"#{larger}"),
    ]

    async def job(guest: GuestLink) -> list[ToolResult]:
        return await run_batch(guest, turn, 20)

    assert [result.text for result in with_agent(root, job)] == [
        "1\nexit 0",
        "2\nexit 0",
        "error: the command is too long: write it to a file, then run that file",
    ]


def test_a_regular_expression_without_end_is_killed_at_its_deadline(root: Path) -> None:
    (root / "a").write_text("a" * 40 + "b\n")

    async def job(guest: GuestLink) -> tuple[ToolResult, ToolResult, list[bool]]:
        (late,) = await run_batch(guest, [call("search", pattern=r"^(a+)+\Z")], 0.5)
        (next_one,) = await run_batch(guest, [call("read", path="calc.py")], 1)
        await asyncio.sleep(0.5)
        return late, next_one, [each.running for each in await guest.processes()]

    started = time.monotonic()
    late, after, running = with_agent(root, job)
    assert late.timed_out and late.text == "timed out after 0.5 s" and not late.ok
    assert after.ok and not any(running) and time.monotonic() - started < 5


def test_a_call_that_nobody_waits_for_leaves_nothing_running(root: Path) -> None:
    (root / "a").write_text("a" * 40 + "b\n")

    async def job(guest: GuestLink) -> list[bool]:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await run_batch(guest, [call("search", pattern=r"^(a+)+\Z"), call("read", path="calc.py")], 60)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await run_batch(guest, [call("exec", command="sleep 1000 & sleep 1000")], 60)
        (found,) = await run_batch(guest, [call("exec", command="jobs -p; echo done")], 5)
        assert found.text == "done\nexit 0"
        return [each.running for each in await guest.processes()]

    assert not any(with_agent(root, job))


def test_huge_files_hold_nobody_up(root: Path) -> None:
    (root / "newlines").write_bytes(b"\n" * (32 * 1024 * 1024))
    (root / "larger").write_bytes(b"x" * (32 * 1024 * 1024 + 1))

    async def job(guest: GuestLink) -> tuple[list[ToolResult], float]:
        slowest = 0.0

        async def beat() -> None:
            nonlocal slowest
            while True:
                started = time.monotonic()
                await asyncio.sleep(0.001)
                slowest = max(slowest, time.monotonic() - started)

        heart = asyncio.create_task(beat())
        calls = [call("read", path="newlines"), call("edit", path="newlines", line=20_000_000, new="x")]
        results = await run_batch(guest, [*calls, call("read", path="larger")], 30)
        heart.cancel()
        return results, slowest

    results, slowest = with_agent(root, job)
    assert results[0].text.startswith("1 \n2 \n") and results[0].text.endswith("33554432 ")
    assert (
        results[0].true_bytes
        == sum(len(str(n)) for n in (1, 9))
        - 2
        + sum(9 * 10 ** (d - 1) * d for d in range(1, 8))
        + (33554432 - 10**7 + 1) * 8
        + 2 * 33554432
        - 1
    )
    assert results[1].text == "ok" and results[2].text == "error: larger than 33554432 bytes: larger"
    assert slowest < 1.5  # a list of the lines takes ten seconds and gigabytes


LINES = st.lists(st.binary(max_size=40), max_size=60).map(b"\n".join)


@given(LINES, st.integers(1, 70), st.integers(1, 70), st.integers(0, 30))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_numbering_of_large_files_is_that_of_small_ones(
    monkeypatch: pytest.MonkeyPatch, data: bytes, start: int, count: int, block: int
) -> None:
    end = min(start + count, textfile.line_count(data))
    if start > end:
        return
    naive = Output(64)
    naive.feed(b"\n".join(b"%d %b" % pair for pair in enumerate(data.split(b"\n")[start - 1 : end], start)))
    with monkeypatch.context() as patch:
        patch.setattr(textfile, "MAX_OUTPUT_BYTES", 64)
        patch.setattr(textfile, "_BLOCK", block + 1)
        small = textfile.numbered(data, start, end)
        patch.setattr(textfile, "_WHOLE", 0)
        large = textfile.numbered(data, start, end)
    for output in (small, large):
        assert (output.text(), output.true_bytes) == (naive.text(), naive.true_bytes)


@given(LINES, st.integers(1, 70), st.binary(max_size=9))
def test_replacing_a_line_keeps_all_others(data: bytes, number: int, new: bytes) -> None:
    if number > textfile.line_count(data):
        return
    lines = data.split(b"\n")
    lines[number - 1] = new.removesuffix(b"\n")
    assert textfile.replace_line(data, number, new) == b"\n".join(lines)
