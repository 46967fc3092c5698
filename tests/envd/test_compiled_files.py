"""Byte code of hidden tests and of a template's modules: every run has it."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from envd.client import Limits
from envd.errors import SandboxGone
from envd.sandbox.runner import as_cached, cached_path
from envd.server import compiled_files
from envd.server.compiled_files import CompiledFiles, modules_of
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


def test_every_run_of_a_file_finds_its_byte_code_and_says_the_same(namespaces: Harness) -> None:
    files = hidden()
    runs = [statuses(namespaces, files, {"calc.py": RIGHT}) for _ in range(3)]
    assert runs == [["passed", "passed"]] * 3
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
    assert runs == [["passed", "passed"]] * 3  # add gives 4 if the attack did anything


def test_reading_it_is_told_as_reading_the_test_is(namespaces: Harness) -> None:
    reader = 'import glob\n\nfor path in glob.glob("tests/__pycache__/*"):\n    open(path, "rb").read()\n\n\n' + RIGHT
    files = hidden()
    told = [
        namespaces.verify({"calc.py": reader}, hidden=files, tests=TESTS, product=["calc.py"]).tampering
        for _ in range(2)
    ]
    assert told == [("read:hidden-test",)] * 2


def test_files_whose_tests_do_not_run_have_byte_code_too(namespaces: Harness) -> None:
    looking = LOOKING.replace("parent.glob", "parent.parent.glob").replace("__pycache__/test_secret", "**/test_other")
    files = {**hidden(looking), "tests/deep/test_other.py": b"def test_it():\n    pass\n", "tests/table.py": b""}
    assert statuses(namespaces, files, {"calc.py": RIGHT}) == ["passed", "passed"]


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
    monkeypatch.setattr(compiled_files, "MOST_BYTES", 250)
    made: list[str] = []

    async def compiled(paths: Sequence[str]) -> dict[str, bytes]:
        made.extend(paths)
        await asyncio.sleep(0)
        return {path: path[0].encode() * 100 for path in paths if path != "bad"}

    async def run() -> None:
        cache = CompiledFiles()
        found = await asyncio.gather(*(cache.of({"a": "1", "b": "2"}, compiled) for _ in range(5)))
        assert found == [{"a": b"a" * 100, "b": b"b" * 100}] * 5 and made == ["a", "b"]
        assert [await cache.of({"bad": "3"}, compiled) for _ in range(3)] == [{}] * 3 and made == ["a", "b", "bad"]
        assert await cache.of({"c": "4"}, compiled) == {"c": b"c" * 100}
        assert await cache.of({"b": "2"}, compiled) == {"b": b"b" * 100} and made == ["a", "b", "bad", "c"]
        assert await cache.of({"a": "1"}, compiled) == {"a": b"a" * 100} and made[-1] == "a"  # it was the oldest

    asyncio.run(run())


def test_a_failed_compilation_fails_its_runs_and_is_tried_again() -> None:
    failures = [SandboxGone("it ended")]

    async def compiled(paths: Sequence[str]) -> dict[str, bytes]:
        await asyncio.sleep(0)
        if failures:
            raise failures.pop()
        return dict.fromkeys(paths, b"code")

    async def run() -> None:
        cache = CompiledFiles()
        found = await asyncio.gather(
            *(cache.of({"a": "1", "b": "2"}, compiled) for _ in range(3)), return_exceptions=True
        )
        assert [str(each) for each in found] == ["it ended"] * 3
        assert await cache.of({"a": "1", "b": "2"}, compiled) == {"a": b"code", "b": b"code"}

    asyncio.run(run())


FINDS_LARGE = """\
from pathlib import Path

from calc import add


def test_add():
    assert add(1, 2) == 3 and list(Path("__pycache__").glob("large.*"))
"""


def test_small_limits_of_a_task_do_not_keep_byte_code_from_it(namespaces: Harness) -> None:
    large = [f"def f{n}(a, b={{'x': {n}}}):\n    return [each + {n} for each in a if each % 3]\n" for n in range(9000)]
    files = {"calc.py": RIGHT.encode(), "large.py": f"{''.join(large)}# {secrets.token_hex(8)}\n".encode()}
    small = Limits(memory_mb=96)
    found = namespaces.verify({}, files=files, hidden=hidden(FINDS_LARGE), tests=TESTS[:1], limits=small)
    assert [each.status for each in found.outcomes] == ["passed"]


IMPORTING = """\
from pathlib import Path

from calc import add
from pack import helper, noisy, other


def test_add():
    assert add(helper.number() + other.number(), noisy.number()) == 3


def test_cached():
    found = {path.name.partition(".")[0] for path in Path(helper.__file__).parent.glob("__pycache__/*.pyc")}
    assert found == {"__init__", "helper"}
"""
NUMBER = "def number():\n    return 1\n"


def test_modules_that_a_diff_does_not_change_get_byte_code(namespaces: Harness) -> None:
    files = {
        "calc.py": RIGHT.encode(),
        "pack/__init__.py": b"",
        "pack/helper.py": f"{NUMBER}# {secrets.token_hex(8)}\n".encode(),
        "pack/other.py": b"def number():\n    return 9\n",
        "pack/noisy.py": NUMBER.encode() + b"# \\d\nTEXT = '\\d'\n",
        "pack/broken.py": b"def number(:\n",
        "tests/test_secret.py": b"",
    }
    hidden = {"tests/test_secret.py": IMPORTING.encode()}
    right = {"pack/other.py": NUMBER}
    runs = [namespaces.verify(right, files=files, hidden=hidden, tests=TESTS) for _ in range(2)]
    assert [[each.status for each in result.outcomes] for result in runs] == [["passed", "passed"]] * 2
    assert not any(each.tampering for each in runs)
    changed = {"pack/other.py": NUMBER, "pack/helper.py": "def number():\n    return 7\n"}
    wrong = namespaces.verify(changed, files=files, hidden=hidden, tests=TESTS)
    assert [each.status for each in wrong.outcomes] == ["failed", "failed"], "a changed module runs as it is"


def test_modules_of_a_template_are_those_of_its_product(tmp_path: Path) -> None:
    for path in ("a.py", "pack/b.py", "pack/test_b.py", "conftest.py", "no-module/c.py", "pack/data.txt"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("x = 1\n")
    (tmp_path / "pack/link.py").symlink_to("b.py")
    assert set(modules_of(tmp_path)) == {"a.py", "pack/b.py"}
