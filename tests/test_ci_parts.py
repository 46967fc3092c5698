"""Continuous integration runs every test: pytest takes each module, and the slow suite's parts are the whole of it."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARK = "mark" + ".slow"


def test_every_slow_test_is_in_one_part() -> None:
    text = (ROOT / ".ci" / "run").read_text()
    parts = re.findall(r'^  "\d+ (tests/[^"]+)"$', text, re.MULTILINE)
    paths = [ROOT / path for part in parts for path in part.split()]
    assert len(parts) > 4 and all(path.exists() for path in paths)
    slow = [path for path in (ROOT / "tests").rglob("test_*.py") if MARK in path.read_text()]
    assert len(slow) > 20
    for path in slow:
        holding = [each for each in paths if path == each or each in path.parents]
        assert len(holding) == 1, f"{path.relative_to(ROOT)} is in {len(holding)} parts of .ci/run: name it in one"


def test_no_two_test_modules_have_one_name() -> None:
    """pytest collects only the first of them where folders are no packages."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
