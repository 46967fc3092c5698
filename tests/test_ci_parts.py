"""Continuous integration runs the slow suite by parts, which together are the whole of it."""

from __future__ import annotations

import re
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
