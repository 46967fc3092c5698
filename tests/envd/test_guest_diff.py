"""The diff over an agent's stream is the diff of the two directories, byte for byte."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from envd.errors import SandboxGone
from envd.guest.link import GuestLink
from envd.sandbox.diff import OVERSIZED, workspace_diff
from envd.server import guestdiff
from envd.server.guestdiff import guest_diff
from envd.tools.gitdiff import Effort, Side, TooLarge, patch_of
from tests.envd.agents import agent, with_agent
from tests.envd.test_diff import TREES, build

STAMP = 1_000_000_000


def prepared(directory: Path, files: dict[str, bytes]) -> tuple[Path, Path]:
    """A template and a workspace copied from it, stamps and all."""
    template = build(directory / "template", {name: (content, False) for name, content in files.items()})
    for path in template.rglob("*"):
        os.utime(path, (STAMP, STAMP))
    shutil.copytree(template, directory / "workspace", symlinks=True)
    return template, directory / "workspace"


@given(TREES, TREES)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_two_trees(old: dict[str, tuple[bytes, bool]], new: dict[str, tuple[bytes, bool]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        template, workspace = build(Path(directory) / "template", old), build(Path(directory) / "workspace", new)
        (workspace / "link").symlink_to("elsewhere")
        expected = workspace_diff(template, workspace)
        assert with_agent(workspace, lambda guest: guest_diff(guest, template)) == expected


def test_odd_things_and_large_ones(tmp_path: Path) -> None:
    names = ["a", "b c", "d/e", "d/\u00e9", 'q"t\n', "same", "gone", "mode"]
    template, workspace = prepared(tmp_path, dict.fromkeys(names, b"one\ntwo\n" * 20))
    (workspace / "a").write_bytes(b"one\nthree\n" * 20)
    (workspace / "b c").unlink()
    (workspace / "b c").symlink_to("/etc/passwd")
    (workspace / "d/e").write_bytes(b"\0binary" * 1000)
    (workspace / 'q"t\n').write_bytes(b"".join(b"%d\n" % n for n in range(200_000)))
    (workspace / "gone").unlink()
    (workspace / "mode").chmod(0o755)
    (workspace / "new").write_bytes(os.urandom(3_000_000))
    os.mkfifo(workspace / "fifo")
    for name in (".git", "d/__pycache__"):
        (workspace / name).mkdir()
        (workspace / name / "f").write_text("x")
    (workspace / os.fsdecode(b"bytes\xff")).write_text("x")
    expected = workspace_diff(template, workspace)
    assert expected not in (b"", OVERSIZED)
    assert with_agent(workspace, lambda guest: guest_diff(guest, template)) == expected


def test_only_what_changed_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template, workspace = prepared(tmp_path, {f"f{n}": b"x\n" for n in range(50)})
    (workspace / "f7").write_text("y\n")
    read: list[str] = []
    real = GuestLink.read_all

    async def counted(self: GuestLink, path: str, max_bytes: int) -> object:
        read.append(path)
        return await real(self, path, max_bytes)

    monkeypatch.setattr(GuestLink, "read_all", counted)
    diff = with_agent(workspace, lambda guest: guest_diff(guest, template))
    assert diff == workspace_diff(template, workspace) and read == ["f7"]


@pytest.mark.parametrize("size", [33 * 1024 * 1024, 300 * 1024 * 1024])
def test_beyond_the_bounds_it_is_oversized(tmp_path: Path, size: int) -> None:
    template, workspace = prepared(tmp_path, {"f": b"x"})
    with (workspace / "f").open("wb") as file:
        for _ in range(0, size, 1024 * 1024):
            file.write(b"y" * 1024 * 1024)
    assert with_agent(workspace, lambda guest: guest_diff(guest, template)) == OVERSIZED


def test_lines_made_to_be_slow_to_compare_cost_seconds_and_hold_nobody_up(tmp_path: Path) -> None:
    slow = {f"f{n}": b"x\n" * 990 for n in range(8)}
    template, workspace = prepared(tmp_path, slow)
    for name in slow:
        (workspace / name).write_bytes(b"x\ny\n" * 495)
    slowest = 0.0

    async def job(guest: GuestLink) -> bytes:
        async def beat() -> None:
            nonlocal slowest
            while True:
                started = time.monotonic()
                await asyncio.sleep(0.001)
                slowest = max(slowest, time.monotonic() - started)

        heart = asyncio.create_task(beat())
        try:
            return await guest_diff(guest, template)
        finally:
            heart.cancel()

    diff = with_agent(workspace, job)
    assert diff.count(b"diff --git") == 8 and slowest < 0.3
    assert diff == workspace_diff(template, workspace)


def test_effort_beyond_what_is_allowed_gives_plain_hunks_that_still_apply(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x\n" * 900)
    change = ("f", Side("100644", b"x\n" * 900), Side("100644", b"x\ny\n" * 450))
    patch = patch_of([change], Effort(1000))
    assert patch.count(b"\n@@") == 1
    subprocess.run(["git", "apply", "-"], input=patch, cwd=tmp_path, check=True)
    assert (tmp_path / "f").read_bytes() == b"x\ny\n" * 450
    with pytest.raises(TooLarge):
        patch_of([change], Effort(1000, strict=True))


def test_a_sandbox_that_ends_half_way_has_no_diff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template, workspace = prepared(tmp_path, {f"f{n}": b"x" * 100_000 for n in range(20)})
    for n in range(20):
        (workspace / f"f{n}").write_bytes(b"y" * 100_000)
    real = GuestLink.read_all

    async def ends(self: GuestLink, path: str, max_bytes: int) -> object:
        if path == "f5":
            self.close()
        return await real(self, path, max_bytes)

    monkeypatch.setattr(GuestLink, "read_all", ends)

    async def job() -> None:
        async with agent(workspace) as guest:
            with pytest.raises(SandboxGone):
                await guest_diff(guest, template)

    asyncio.run(job())


def test_paths_that_no_workspace_has_are_ignored() -> None:
    listed = [(path, "file", 0o644, 1, 1, "") for path in ("../x", "/x", "a//b", "a/./b", "a/.git/b", "")]
    assert guestdiff._by_path(listed) == {}  # type: ignore[arg-type]
