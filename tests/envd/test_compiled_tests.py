"""Byte code of hidden tests: made from the second run on, used by pytest, and out of reach of the code under test."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from envd.errors import SandboxGone
from envd.sandbox.runner import as_cached, cached_path
from envd.server import compiled_tests
from envd.server.compiled_tests import CompiledTests
from tests.envd.harness import Harness

RIGHT = "def add(a, b):\n    return a + b\n"
LOOKING = """\
from pathlib import Path

from calc import add


def test_add():
    assert add(1, 2) == 3


def test_cached():
    assert list(Path(__file__).parent.glob("__pycache__/test_secret.*-pytest-*.pyc"))
"""
TESTS = ("tests/test_secret.py::test_add", "tests/test_secret.py::test_cached")


def hidden(text: str = LOOKING) -> dict[str, bytes]:
    """A test file that no other test has used."""
    return {"tests/test_secret.py": f"{text}# {secrets.token_hex(8)}\n".encode()}


def statuses(harness: Harness, files: Mapping[str, bytes], changes: Mapping[str, str]) -> list[str]:
    return [each.status for each in harness.verify(changes, hidden=files, tests=TESTS).outcomes]


def test_the_second_run_of_a_file_finds_its_byte_code_and_says_the_same(namespaces: Harness) -> None:
    files = hidden()
    runs = [statuses(namespaces, files, {"calc.py": RIGHT}) for _ in range(3)]
    assert runs == [["passed", "failed"], ["passed", "passed"], ["passed", "passed"]]
    first, second, third = (namespaces.verify({}, hidden=hidden(), tests=TESTS) for _ in range(3))
    assert first.outcomes[0].message == "assert -1 == 3\n +  where -1 = add(1, 2)"
    assert [each.outcomes[0] for each in (second, third)] == [first.outcomes[0]] * 2


def test_a_file_that_does_not_compile_says_so_in_every_run(namespaces: Harness) -> None:
    files = hidden("def test_add(:\n")
    found = [namespaces.verify({"calc.py": RIGHT}, hidden=files, tests=TESTS[:1]).outcomes for _ in range(3)]
    assert found[0] == found[1] == found[2] and found[0][0].status == "error"


ATTACKS = {
    "writes": "path.write_bytes(b'')",
    "removes": "path.unlink()",
    "moves": "path.rename(path.with_suffix('.old'))",
    "moves the folder": "path.parent.rename(path.parent.with_name('x'))",
    "puts another in its place": "os.replace(__file__, path)",
    "changes its rights": "path.chmod(0o777)",
}
ATTACKER = """\
import os
from pathlib import Path

for path in Path(__file__).parent.glob("tests/__pycache__/test_secret.*.pyc"):
    try:
        {attack}
    except OSError:
        continue
    Path("/tmp/done").write_text("done")


def add(a, b):
    return 3 if not Path("/tmp/done").exists() else 4
"""


@pytest.mark.parametrize("attack", ATTACKS)
def test_code_under_test_can_not_change_it(namespaces: Harness, attack: str) -> None:
    files, changes = hidden(), {"calc.py": ATTACKER.format(attack=ATTACKS[attack])}
    runs = [statuses(namespaces, files, changes) for _ in range(3)]
    assert runs[1] == runs[2] == ["passed", "passed"]  # add gives 4 if the attack did anything


def test_reading_it_is_told_as_reading_the_test_is(namespaces: Harness) -> None:
    reader = 'import glob\n\nfor path in glob.glob("tests/__pycache__/*"):\n    open(path, "rb").read()\n\n\n' + RIGHT
    files = hidden()
    told = [
        namespaces.verify({"calc.py": reader}, hidden=files, tests=TESTS, product=["calc.py"]).tampering
        for _ in range(2)
    ]
    assert told == [(), ("read:hidden-test",)]


def test_pytest_takes_the_byte_code_at_this_path(tmp_path: Path) -> None:
    source = b"def test_it():\n    assert False\n"
    file = tmp_path / "test_it.py"
    file.write_bytes(source)
    cached = tmp_path / cached_path("test_it.py")
    cached.parent.mkdir()
    cached.write_bytes(as_cached(source, compile("def test_it():\n    pass\n", str(file), "exec")))
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--import-mode=importlib", str(file)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    file.write_bytes(source + b"\n")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


def test_a_file_is_compiled_once_however_many_runs_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_tests, "MOST_BYTES", 250)
    made: list[str] = []

    async def compiled(path: str, content: bytes) -> bytes:
        made.append(path)
        await asyncio.sleep(0)
        if content == b"bad":
            raise SandboxGone("it ended")
        return content * 100

    async def run() -> None:
        cache = CompiledTests()
        assert await cache.of({"a": b"1", "b": b"bad"}, compiled) == {} == dict.fromkeys(made)
        found = await asyncio.gather(*(cache.of({"a": b"1", "b": b"bad"}, compiled) for _ in range(5)))
        assert found == [{"a": b"1" * 100}] * 5
        assert made == ["a", "b"]
        for content in (b"2", b"3"):
            assert await cache.of({"a": content}, compiled) == {}
            assert await cache.of({"a": content}, compiled) == {"a": content * 100}
        assert await cache.of({"a": b"1"}, compiled) == {"a": b"1" * 100}  # made again: it was the oldest
        assert made == ["a", "b", "a", "a", "a"]

    asyncio.run(run())
