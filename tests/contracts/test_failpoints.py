"""A failpoint kills or fails exactly where, and when, the environment says; unset, it does nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from contracts import failpoints
from contracts.errors import ConfigError
from contracts.failpoints import FAIL_VARIABLE, KILL_VARIABLE, POINTS, failpoint, parse_order

ROOT = Path(__file__).parents[2]
PACKAGES = ("contracts", "envd", "inference", "trainer", "curation", "resources", "ops", "assets", "triplane_dagster")
LOOP = (
    "from contracts.failpoints import failpoint\nfor n in range(5): print(n, flush=True); failpoint('group-committed')"
)


def run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)


def test_without_an_order_a_point_does_nothing() -> None:
    assert not failpoints._ORDERED
    failpoint("group-committed")
    assert run(LOOP).returncode == 0


@pytest.mark.parametrize(("order", "reached"), [("group-committed", 1), ("group-committed:3", 3)])
def test_a_kill_comes_at_the_nth_arrival(order: str, reached: int) -> None:
    done = run(LOOP, **{KILL_VARIABLE: order})
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == [str(number) for number in range(reached)]


def test_children_inherit_the_order_and_count_for_themselves() -> None:
    code = (
        f"import subprocess, sys\nfor _ in range(2): print(subprocess.run([sys.executable, '-c', {LOOP!r}],"
        " capture_output=True).returncode)"
    )
    assert run(code, **{KILL_VARIABLE: "group-committed:2"}).stdout.split() == ["-9", "-9"]


def test_a_fault_is_raised_once_with_the_error_that_was_named(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from contracts.store import LocalStore\n"
        "store = LocalStore(Path(sys.argv[1])) if len(sys.argv) > 1 else LocalStore(Path('.'))\n"
        "from contracts.errors import StoreError\n"
        "for n in range(3):\n"
        "    try: print(store.create(f'k{n}', b'x'))\n"
        "    except (StoreError, OSError) as error: print(type(error).__name__, error)\n"
        "print(sorted(path.name for path in store.scratch.iterdir()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, FAIL_VARIABLE: "store-write:2:ENOSPC"},
        check=True,
    )
    first, second, third, left = done.stdout.splitlines()
    assert (first, third, left) == ("True", "True", "[]")
    assert second.startswith("StoreError store") and "is full" in second


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        (KILL_VARIABLE, "nowhere"),
        (KILL_VARIABLE, "group-committed:0"),
        (KILL_VARIABLE, "group-committed:x"),
        (KILL_VARIABLE, "group-committed:1:EIO"),
        (FAIL_VARIABLE, "store-write:1:ENOTHING"),
    ],
)
def test_a_malformed_order_is_one_line_that_names_it(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{variable}={text}: ")):
        parse_order(variable, text)


def test_every_named_point_is_in_the_code_and_no_other() -> None:
    code = "\n".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    assert set(re.findall(r'\bfailpoint\("([a-z-]+)"\)', code)) == set(POINTS)
