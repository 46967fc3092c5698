"""A suite names the programs that this machine lacks; the tests that need them are skipped by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import needs

ROOT = Path(__file__).parent.parent
HIDDEN = {"mksquashfs", "unsquashfs"}


@pytest.fixture
def path_without_squashfs(tmp_path: Path) -> str:
    """A PATH with an executable `qemu-system-x86_64` and this machine's programs, without squashfs-tools."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for place in ("/usr/bin", "/bin", "/usr/sbin"):
        for program in Path(place).iterdir():
            if program.name not in HIDDEN and not os.path.lexists(folder / program.name):
                (folder / program.name).symlink_to(program)
    if not os.path.lexists(folder / "qemu-system-x86_64"):
        (folder / "qemu-system-x86_64").symlink_to("/bin/false")
    return str(folder)


@pytest.mark.slow
def test_slow_suite_names_a_missing_program_first_and_skips_its_tests(path_without_squashfs: str) -> None:
    command = ["-p", "no:cacheprovider", "-m", "slow", "-rs", "tests/envd/test_backend_contract.py", "-k", "qemu"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *command],
        cwd=ROOT,
        env={**os.environ, "PATH": path_without_squashfs, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "Missing programs; tests that need them are skipped (slow):", done.stdout + done.stderr
    assert "  mksquashfs: for QEMU and Firecracker sandboxes; install: apt-get install squashfs-tools" in lines
    assert "needs mksquashfs (apt-get install squashfs-tools)" in done.stdout
    assert " skipped" in lines[-1] and "failed" not in lines[-1] and "error" not in lines[-1]


def test_report_is_empty_where_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "NEEDS", {"shell": needs.Need(("sh", "/nowhere/*"), "tests", "", ("test",))})
    assert needs.report("test") == []
    monkeypatch.setattr(needs, "NEEDS", {"nothing": needs.Need(("/nowhere/*",), "tests", "make it", ("test",))})
    assert needs.report("test")[1:] == ["  nothing: for tests; install: make it"]
    assert needs.report("slow") == []
