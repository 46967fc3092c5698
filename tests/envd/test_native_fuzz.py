"""The fuzzer of frames finds a fault of the kind that it is for."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from envd.native import build
from tests.fuzz.agents import AgentTarget, Finding, build_agent
from tests.needs import require

GUARD = "        if (from->bad) return list;"
PATIENCE_S = 240.0


@pytest.fixture
def work() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.mark.slow
def test_a_missing_bound_of_a_list_is_found(work: Path) -> None:
    require("C compiler")  # ziglang has no sanitizers
    sources = work / "sources"
    sources.mkdir()
    for path in (*build.SOURCES.glob("*.c"), *build.SOURCES.glob("*.h")):
        (sources / path.name).write_bytes(path.read_bytes())
    lines = (sources / "guest_bytes.c").read_text().splitlines()
    without = [line for line in lines if not line.startswith(GUARD)]
    assert len(without) == len(lines) - 1, "the line that bounds a list is another now"
    (sources / "guest_bytes.c").write_text("\n".join(without) + "\n")
    target = AgentTarget(build_agent(work, sources), work / "agent", 1, escaped=False)
    try:
        with pytest.raises(Finding, match="heap-buffer-overflow") as found:
            until = time.monotonic() + PATIENCE_S
            while time.monotonic() < until:
                target.step()
    finally:
        target.stop()
    assert "take_strings" in str(found.value)
