from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envd.client import ToolCall
from envd.operations.client import ManagedSandbox
from envd.sandbox.diff import changed_paths, workspace_diff
from envd.sandbox.patch import NotPlain, apply_plain
from tests.envd.harness import FILES, FIX, Harness

NAMES = st.sampled_from(["f", "g h", "d/e.py", "d/x/é", 'q"t', "n"])
TEXTS = st.lists(st.sampled_from(["x\n", "y\n", "z\r\n", "\n", "q"]), max_size=30).map(
    lambda parts: "".join(parts).encode()
)
LINKS = st.sampled_from(["f", "nowhere"])
TREES = st.dictionaries(NAMES, st.tuples(TEXTS | st.binary(max_size=80), st.booleans()), max_size=6)


def build(root: Path, tree: dict[str, tuple[bytes, bool]]) -> Path:
    root.mkdir()
    for name, (content, executable) in tree.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
        (root / name).chmod(0o755 if executable else 0o644)
    return root


@given(TREES, TREES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_git_applies_any_diff(old: dict[str, tuple[bytes, bool]], new: dict[str, tuple[bytes, bool]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        before, after = build(Path(directory) / "before", old), build(Path(directory) / "after", new)
        patch = workspace_diff(before, after)
        assert patch == workspace_diff(before, after)
        if patch:
            command = ["git", "apply", "--whitespace=nowarn", "-"]
            subprocess.run(command, input=patch, cwd=before, check=True, capture_output=True)
        assert changed_paths(before, after) == []


@given(TREES, TREES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_plain_applier_does_what_git_does_or_declines(
    old: dict[str, tuple[bytes, bool]], new: dict[str, tuple[bytes, bool]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        before, after = build(Path(directory) / "before", old), build(Path(directory) / "after", new)
        untouched = build(Path(directory) / "untouched", old)
        try:
            apply_plain(before, workspace_diff(before, after))
        except NotPlain:
            assert changed_paths(untouched, before) == []
        else:
            assert changed_paths(before, after) == []


def test_the_plain_applier_takes_the_usual_final_state(tmp_path: Path) -> None:
    before = build(tmp_path / "before", {"calc.py": (FILES["calc.py"], False), "old.py": (b"x", False)})
    new = {"calc.py": (b"def add(a, b):\n    return a + b\n", False), "d/new.py": (b"y = 1", False)}
    after = build(tmp_path / "after", new)
    apply_plain(before, workspace_diff(before, after))
    assert changed_paths(before, after) == []


@pytest.mark.parametrize(
    "patch",
    [
        b"--- a/f\n+++ b/f\n@@ -1 +1 @@\n-x\n+y\n",
        b"diff --git a/../f b/../f\nindex 1..2\n--- a/../f\n+++ b/../f\n@@ -0,0 +1 @@\n+y\n",
        (
            b"diff --git a/.git/f b/.git/f\nnew file mode 100644\nindex 1..2\n--- /dev/null\n+++ b/.git/f\n@@ -0,0 +1"
            b" @@\n+y\n"
        ),
        b"diff --git a/f b/f\nindex 1..2 100644\n--- a/f\n+++ b/f\n@@ -1 +1 @@\n-other\n+y\n",
        (
            b"diff --git a/link/f b/link/f\nnew file mode 100644\nindex 1..2\n--- /dev/null\n+++ b/link/f\n@@ -0,0 +1"
            b" @@\n+y\n"
        ),
        b"diff --git a/f b/f\nindex 1..2 100644\n--- a/f\n+++ b/f\n@@ -1,9 +1 @@\n-x\n",
        b"",
    ],
)
def test_the_plain_applier_declines_what_is_odd_and_writes_nothing(tmp_path: Path, patch: bytes) -> None:
    root = build(tmp_path / "root", {"f": (b"x\n", False)})
    (root / "link").symlink_to("/tmp")
    with pytest.raises(NotPlain):
        apply_plain(root, patch)
    assert (root / "f").read_bytes() == b"x\n" and sorted(path.name for path in root.iterdir()) == ["f", "link"]


def test_a_link_that_replaces_a_file_applies(tmp_path: Path) -> None:
    before, after = build(tmp_path / "before", {"f": (b"x\n", False)}), build(tmp_path / "after", {})
    (after / "f").symlink_to("elsewhere")
    patch = workspace_diff(before, after)
    subprocess.run(["git", "apply", "-"], input=patch, cwd=before, check=True, capture_output=True)
    assert (before / "f").readlink() == Path("elsewhere")


def test_a_large_rewrite_does_not_cost_quadratic_time(tmp_path: Path) -> None:
    before = build(tmp_path / "before", {"f": (b"".join(b"%d\n" % n for n in range(50_000)), False)})
    after = build(tmp_path / "after", {"f": (b"".join(b"%d\n" % (n * 7 % 50_000) for n in range(50_000)), False)})
    patch = workspace_diff(before, after)
    subprocess.run(["git", "apply", "-"], input=patch, cwd=before, check=True, capture_output=True)
    assert changed_paths(before, after) == []


def test_both_backends_give_the_same_diff(namespaces: Harness, plain: Harness) -> None:
    calls = [
        FIX,
        ToolCall("write", {"path": "new.py", "content": "x = 1"}),
        ToolCall(
            "exec", {"command": r"mkdir -p __pycache__ d; touch __pycache__/x.pyc; printf 'a\0b' > d/bin; rm -r tests"}
        ),
    ]

    async def job(sandbox: ManagedSandbox) -> tuple[bytes, bytes]:
        for call in calls:
            assert (await sandbox.call(call)).ok
        return await sandbox.diff(), await sandbox.finish()

    diffs = {*namespaces.sandbox(job), *plain.sandbox(job)}
    assert len(diffs) == 1
    diff = diffs.pop()
    assert b"GIT binary patch" in diff and b"deleted file mode" in diff and b"pycache" not in diff


def test_an_untouched_workspace_has_an_empty_diff(anywhere: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> bytes:
        await sandbox.call(ToolCall("exec", {"command": "cat calc.py; git status; touch calc.py"}))
        return await sandbox.finish()

    assert anywhere.sandbox(job) == b""


def test_the_workspace_is_a_clean_repository_with_one_commit_that_never_changes(anywhere: Harness) -> None:
    command = "git status --porcelain; git rev-parse HEAD; git rev-list --count HEAD"
    first, second = (anywhere.shell(command, files=FILES)[0] for _ in range(2))
    assert first == second
    assert first.splitlines()[1:] == ["1", "exit 0"]
