"""Tests that the screen calls directly, beside what pytest's protocol says of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "direct_calls.py"
DIRECT = """
import warnings
import pytest


def test_passes():
    assert 1 + 1 == 2


def test_fails():
    assert {"a": 1, "b": [1, 2]} == {"a": 1, "b": [1, 3]}, "why"


def test_raises():
    {}["missing"]


def test_expects():
    with pytest.raises(ValueError):
        pass


def test_gives_up():
    pytest.fail("given up", pytrace=False)


def test_skips():
    pytest.skip("not here")


def test_is_expected_to_fail():
    pytest.xfail("known")


def test_exits():
    raise SystemExit(3)


def test_warns():
    warnings.simplefilter("error")
    warnings.warn("old", DeprecationWarning)


@pytest.mark.parametrize("value, want", [(1, 1), (2, 3)])
def test_values(value, want):
    assert value == want


class TestMethods:
    def test_method(self):
        assert self is None
"""
OTHER = """
import unittest
import pytest


@pytest.fixture
def made():
    return 1


@pytest.fixture(params=[1, 2])
def each(request):
    return request.param


def test_fixture(made):
    assert made == 2


def test_parameters_of_a_fixture(each):
    assert each == 1


@pytest.mark.parametrize("each", [1], indirect=True)
def test_indirect(each):
    assert each == 2


@pytest.mark.skip(reason="mark")
def test_skipped():
    assert False


@pytest.mark.xfail
def test_expected():
    assert False


class TestSetup:
    def setup_method(self):
        self.value = 1

    def test_value(self):
        assert self.value == 1


class TestCase(unittest.TestCase):
    def test_case(self):
        self.assertEqual(1, 2)


async def test_coroutine():
    assert False
"""


def outcomes(folder: Path, text: str) -> dict[str, Any]:
    (folder / "test_it.py").write_text(text)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": root, "PYTEST_ADDOPTS": ""}
    command = [sys.executable, str(PROGRAM), str(folder / "test_it.py"), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_direct_call_reports_what_the_protocol_does(tmp_path: Path) -> None:
    found = outcomes(tmp_path, DIRECT)
    assert len(found) == 12
    for name, (direct, protocol) in found.items():
        assert direct == protocol, name
    assert [found[f"test_{name}"][0][0] for name in ("passes", "fails", "skips")] == ["passed", "failed", "skipped"]
    assert "'b': [1, 3]" in found["test_fails"][0][1]


def test_what_needs_the_protocol_is_not_called_directly(tmp_path: Path) -> None:
    found = outcomes(tmp_path, OTHER)
    assert len(found) == 9 and all(direct is None for direct, _ in found.values())
    (tmp_path / "conftest.py").write_text("def pytest_runtest_call(item):\n    pass\n")
    assert all(direct is None for direct, _ in outcomes(tmp_path, DIRECT).values())
