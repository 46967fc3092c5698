"""Continuous integration runs every test or names what it leaves out: pytest takes each module, the slow suite's parts
are the whole of it, and what tests need is installed.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.escape.attack import BACKENDS
from tests.needs import NEEDS

ROOT = Path(__file__).parent.parent
MARK = "mark" + ".slow"
RUN = (ROOT / ".ci" / "run").read_text()
ESSENTIAL = "util-linux"
"""A package that every Debian has."""


def test_every_slow_test_is_in_one_part() -> None:
    parts = re.findall(r'^  "\d+ (tests/[^"]+)"$', RUN, re.MULTILINE)
    patterns = [pattern for part in parts for pattern in part.split()]
    assert len(parts) > 4 and all(list(ROOT.glob(pattern)) for pattern in patterns)
    paths = [path for pattern in patterns for path in ROOT.glob(pattern)]
    slow = [path for path in (ROOT / "tests").rglob("test_*.py") if MARK in path.read_text()]
    assert len(slow) > 20
    for path in slow:
        holding = [each for each in paths if path == each or each in path.parents]
        assert len(holding) == 1, f"{path.relative_to(ROOT)} is in {len(holding)} parts of .ci/run: name it in one"


def test_machines_take_turns_with_the_slow_suite() -> None:
    parts = re.findall(r'^  "\d+ machines (\w+)"$', RUN, re.MULTILINE)
    assert parts == [backend for backend in BACKENDS if backend != "namespaces"]
    assert f'make test-escape WITHOUT="{" ".join(parts)}"' in RUN
    assert f"-k '{' and '.join(f'not {backend}' for backend in parts)}'" in RUN
    assert all(f"\ninstall_{backend}() {{" in RUN for backend in parts)


def test_packages_that_tests_need_are_installed_before_their_suites() -> None:
    at_first = RUN.partition("\nmake install\n")[0]
    packages = set(re.findall(r"missing\+=\(([\w-]+)\)", at_first))
    for tools in re.findall(r"^for tool in (.+?); do", at_first, re.MULTILINE):
        packages |= set(tools.split())
    lacking = {
        package
        for need in NEEDS.values()
        if (package := need.install.removeprefix("apt-get install ")) != need.install
        if package not in packages | {ESSENTIAL}
    }
    assert lacking == {"qemu-system-x86"}, "what only `machines qemu` needs is installed there"


def test_every_suite_runs_or_is_left_out_by_name() -> None:
    suites = re.findall(r"^(test[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(suites) > 8
    assert [suite for suite in suites if not re.search(rf"\b{suite}(?![\w-])", RUN)] == []


def test_no_two_test_modules_have_one_name() -> None:
    """pytest collects only the first of them where folders are no packages."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
