"""Only what is declared leaves a sandbox, and only that counts where a final state is graded."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from contracts.patterns import PathPatterns
from contracts.pb import envd_pb2 as pb
from envd.client import EnvdError, Export, LeftOut, ToolCall
from envd.guest.link import GuestLink
from envd.operations.client import ManagedSandbox, OperationsClient
from envd.sandbox.diff import changed_paths, workspace_diff
from envd.sandbox.patch import without_files
from envd.server.exporting import TOLD, Exporting
from envd.server.guestdiff import guest_diff
from envd.types import VerifyResult
from tests.envd.agents import with_agent
from tests.envd.harness import FILES, FIX, HIDDEN, TESTS, Harness
from tests.envd.test_diff import TREES, build
from tests.envd.verifying import Verifying

RIGHT = "def add(a, b):\n    return a + b\n"
STAMP = 1_000_000_000


@pytest.mark.parametrize(
    ("pattern", "named", "others"),
    [
        ("*.py", ["a.py", "d/e/a.py", "d.py/x"], ["a.pyc", "py"]),
        ("src/*.py", ["src/a.py"], ["src/d/a.py", "x/src/a.py", "a.py"]),
        ("src/**/data/", ["src/data/x", "src/a/b/data/x/y"], ["src/data", "data/x", "src/a"]),
        ("/a", ["a", "a/b"], ["x/a"]),
        ("out/", ["out/a", "d/out/b"], ["out"]),
        ("src/**", ["src/a", "src/b/c"], ["src", "x/src/a"]),
        ("a/**/**/b", ["a/b", "a/x/y/b/c"], ["b", "a"]),
        ("[ab]?.txt", ["a1.txt", "d/bx.txt"], ["c1.txt", "a.txt", "a/.txt"]),
        ("**", ["a", "a/b"], []),
    ],
)
def test_patterns_name_paths_as_gitignore_does(
    pattern: str, named: list[str], others: list[str], tmp_path: Path
) -> None:
    patterns = PathPatterns([pattern])
    assert [path for path in [*named, *others] if patterns.names(path)] == named
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / ".gitignore").write_text(pattern + "\n")
    command = ["git", "check-ignore", "--no-index", "--stdin"]
    said = subprocess.run(command, input="\n".join([*named, *others]), cwd=tmp_path, capture_output=True, text=True)
    assert said.stdout.split() == named


@pytest.mark.parametrize("bad", ["", "/", "a//b", "../a", "a/./b", "!a", "a**", "a\\b", "a\nb", "x" * 257])
def test_a_pattern_that_is_none_is_refused_in_one_line(bad: str) -> None:
    with pytest.raises(ValueError, match=r"^artifact [^\n]*: (name|write|select) [^\n]*$"):
        PathPatterns([bad])


def test_patterns_made_to_be_slow_are_not() -> None:
    patterns = PathPatterns(["**/" * 80 + "z", "*a*a*a*a*a*a*a*a*a*a*a*a*a*b", "a*" * 100 + "b"])
    assert not patterns.names("a" * 250 + "/" + "d/" * 1500 + "a" * 250)


def exported(directory: Path, **bounds: Any) -> tuple[bytes, LeftOut]:
    """What leaves `workspace` against `template` there."""
    export = Exporting(pb.Export(**bounds))

    async def job(guest: GuestLink) -> bytes:
        return await guest_diff(guest, directory / "template", export=export)

    return with_agent(directory / "workspace", job), export.left_out


def prepared(directory: Path, files: dict[str, bytes]) -> Path:
    """A template and a workspace copied from it, stamps and all; the workspace."""
    template = build(directory / "template", {name: (content, False) for name, content in files.items()})
    for path in template.rglob("*"):
        os.utime(path, (STAMP, STAMP))
    shutil.copytree(template, directory / "workspace", symlinks=True)
    return directory / "workspace"


def touched(diff: bytes) -> list[str]:
    return [line.split()[-1].decode()[2:] for line in diff.splitlines() if line.startswith(b"diff --git")]


def test_declared_files_leave_and_links_pipes_and_others_do_not(tmp_path: Path) -> None:
    workspace = prepared(tmp_path, {"src/a.py": b"1\n", "src/gone.py": b"1\n", "src/pipe.py": b"1\n", "b.py": b"1\n"})
    (workspace / "src/a.py").write_text("2\n")
    (workspace / "src/gone.py").unlink()
    (workspace / "src/pipe.py").unlink()
    os.mkfifo(workspace / "src/pipe.py")
    (workspace / "src/secret.py").symlink_to("/etc/passwd")
    (workspace / "b.py").unlink()
    (workspace / "b.py").symlink_to("/proc/self/environ")
    (workspace / "note.txt").write_text("x")
    (workspace / os.fsdecode(b"\xff")).write_text("x")
    diff, left_out = exported(tmp_path, artifacts=["*.py"])
    assert touched(diff) == ["src/a.py", "src/gone.py", "src/pipe.py"] and b"120000" not in diff
    assert left_out == LeftOut(
        {"undeclared": 2, "link": 2},
        (("b.py", "link"), ("src/secret.py", "link"), ("note.txt", "undeclared"), ("\\xff", "undeclared")),
    )
    everything, none = exported(tmp_path)
    assert everything == workspace_diff(tmp_path / "template", workspace) and none == LeftOut()
    assert everything.count(b"120000") == 2


def test_count_and_size_bound_what_leaves_by_what_changed(tmp_path: Path) -> None:
    workspace = prepared(tmp_path, {f"f{n}": b"x" * 100 for n in range(6)})
    for n in range(6):
        (workspace / f"f{n}").write_bytes(b"x" * 100 if n == 0 else b"y" * (5000 if n == 2 else 100))
    diff, left_out = exported(tmp_path, max_files=3, max_bytes=1000)
    assert touched(diff) == ["f1", "f3", "f4"], "f0 was only touched, f2 is too large"
    assert left_out == LeftOut({"size": 1, "count": 1}, (("f2", "size"), ("f5", "count")))
    (workspace / "large").write_bytes(os.urandom(3_000_000))
    diff, left_out = exported(tmp_path, artifacts=["large", "f1"], max_bytes=3_000_000)
    assert touched(diff) == ["f1"] and left_out.counts == {"size": 1, "undeclared": 5}


def test_a_file_that_grows_while_it_leaves_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = prepared(tmp_path, {"a": b"x", "b": b"x"})
    (workspace / "a").write_bytes(b"yy")
    (workspace / "b").write_bytes(b"yy")
    real = GuestLink.read_all

    async def grows(self: GuestLink, path: str, max_bytes: int) -> Any:
        if path == "a":
            (workspace / "a").write_bytes(b"y" * 5000)
        return await real(self, path, max_bytes)

    monkeypatch.setattr(GuestLink, "read_all", grows)
    diff, left_out = exported(tmp_path, max_bytes=1000)
    assert touched(diff) == ["b"] and left_out == LeftOut({"size": 1}, (("a", "size"),))


def test_what_is_told_is_bounded(tmp_path: Path) -> None:
    workspace = prepared(tmp_path, {"f": b""})
    for n in range(200):
        (workspace / f"{n:03}").symlink_to("f") if n % 2 else (workspace / f"{n:03}").write_text("x")
    diff, left_out = exported(tmp_path, artifacts=["??[13579]"])
    assert diff == b"" and left_out.counts == {"link": 100, "undeclared": 100}
    assert len(left_out.paths) == TOLD and {reason for _, reason in left_out.paths} == {"link"}


def test_a_server_exports_tells_what_it_left_out_and_records_refusals(anywhere: Harness) -> None:
    calls = [FIX, ToolCall("exec", {"command": "ln -s /etc/passwd tests/link; echo x > junk"})]

    async def job(client: OperationsClient) -> None:
        async with await client.create(await client.put_template(FILES)) as sandbox:
            for call in calls:
                await sandbox.call(call)
            whole = await sandbox.diff()
            assert touched(whole) == ["calc.py", "junk", "tests/link"] and sandbox.left_out == LeftOut()
            assert touched(await sandbox.diff(export=Export(("calc.py",)))) == ["calc.py"]
            assert sandbox.left_out.counts == {"undeclared": 2}
            with pytest.raises(EnvdError, match=r"artifact '\.\./x' is no path within the workspace"):
                await sandbox.finish(export=Export(("../x",)))
            assert await sandbox.diff(export=Export()) == whole
            assert touched(await sandbox.finish(export=Export(("calc.py", "tests/"), max_files=5))) == ["calc.py"]
            assert sandbox.left_out == LeftOut(
                {"undeclared": 1, "link": 1}, (("tests/link", "link"), ("junk", "undeclared"))
            )
            found = [each async for each in client.audit(sandbox_id=sandbox.id) if each.kind == "export.refused"]
            assert [json.loads(each.detail_json) for each in found] == [
                {"link": 1, "undeclared": 1, "paths": ["tests/link"]}
            ]

    anywhere.client(job)


def test_a_server_grades_declared_artifacts_alone(anywhere: Harness) -> None:
    async def played(sandbox: ManagedSandbox) -> bytes:
        await sandbox.call(FIX)
        await sandbox.call(ToolCall("write", {"path": "other.py", "content": "x = 1\n"}))
        return await sandbox.finish()

    async def job(client: OperationsClient) -> list[VerifyResult]:
        template = await client.put_template(FILES)
        diff = await played(await client.create(template))
        return [
            await client.verify(template, diff, HIDDEN, TESTS, artifacts=artifacts)
            for artifacts in (["calc.py"], ["other.py"], [])
        ]

    fixed, other, everything = anywhere.client(job)
    assert fixed.outcomes == everything.outcomes and {each.status for each in fixed.outcomes} == {"passed"}
    assert (fixed.tampering, everything.tampering) == (("undeclared:other.py",), ())
    assert other.outcomes[0].status == "failed" and other.tampering == ("undeclared:calc.py",)

    async def wrong(client: OperationsClient) -> None:
        await client.verify(await client.put_template(FILES), b"", HIDDEN, TESTS, artifacts=["a//b"])

    with pytest.raises(EnvdError, match="artifact 'a//b' is no path"):
        anywhere.client(wrong)


@pytest.fixture(scope="module", params=["namespaces", "plain"])
def verifying(request: pytest.FixtureRequest) -> Iterator[Verifying]:
    with Verifying(request.param) as found:
        yield found


CALC = (
    b"diff --git a/calc.py b/calc.py\nindex 1..2 100644\n--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a,"
    b" b):\n-    return a - b\n+    return a + b\n"
)
NOTE = b"diff --git a/note b/note\nnew file mode 100644\nindex 0..1\n--- /dev/null\n+++ b/note\n@@ -0,0 +1 @@\n+x\n"
HARMLESS = ("/note", "link", "d/")


@pytest.mark.parametrize(
    ("diff", "note"),
    [
        (NOTE + CALC, "undeclared:calc.py"),
        (NOTE + CALC.split(b"\n", 2)[2], "undeclared:calc.py"),  # a section that only git sees
        (b"diff --git a/note b/calc.py\n" + CALC.split(b"\n", 1)[1], "undeclared:calc.py"),
        (CALC.replace(b"a/calc.py b/calc.py", b'"a/c\\141lc.py" "b/c\\141lc.py"', 1), "undeclared:calc.py"),
        (
            b"diff --git a/calc.py b/note\nsimilarity index 100%\nrename from calc.py\nrename to note\n",
            "undeclared:calc.py",
        ),
        (b"diff --git a/calc.py b/calc.py\nold mode 100644\nnew mode 100755\n", "undeclared:calc.py"),
        (
            (
                b"diff --git a/link b/link\nnew file mode 120000\nindex 0..1\n--- /dev/null\n+++ b/link\n@@ -0,0 +1"
                b" @@\n+calc.py\n\\ No newline at end of file\n"
            ),
            "link:artifact",
        ),
        (NOTE.replace(b"note", b"__pycache__/note"), "undeclared:__pycache__/note"),
        (
            b"diff --git a/gone b/gone\nindex 1..2 100644\n--- a/gone\n+++ b/gone\n@@ -1 +1 @@\n-a\n+b\n",
            "undeclared:gone",
        ),
    ],
)
def test_a_diff_that_nobody_filtered_changes_nothing_beside_the_artifacts(
    verifying: Verifying, diff: bytes, note: str
) -> None:
    hidden = {
        "test_h.py": (
            b"import os\nfrom calc import add\ndef test_it():\n    assert add(1, 2) == -1\n    assert"
            b" oct(os.stat('calc.py').st_mode)[-3:] in ('644', '600')\n    assert not os.path.lexists('link') and not"
            b" os.path.exists('__pycache__/note')\n"
        )
    }
    result = verifying.verify({}, diff=diff, hidden=hidden, tests=("test_h.py::test_it",), artifacts=HARMLESS)
    assert [each.status for each in result.outcomes] == ["passed"], result
    assert result.tampering == (note,)


def test_many_undeclared_files_leave_room_for_other_notes(verifying: Verifying) -> None:
    changes = {f"u{n}": "x\n" for n in range(30)} | {"calc.py": RIGHT, "d/conftest.py": "x = 1\n"}
    result = verifying.verify(changes, artifacts=("calc.py", "d/"))
    assert {each.status for each in result.outcomes} == {"passed"}
    assert len(result.tampering) == 9 and result.tampering[-1] == "undone:conftest.py"


@given(TREES, TREES, st.sets(st.sampled_from(["f", "d/e.py", 'q"t', "d/x/é"])))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_files_are_taken_out_of_any_diff_and_the_rest_still_applies(
    old: dict[str, tuple[bytes, bool]], new: dict[str, tuple[bytes, bool]], wanted: set[str]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        before, after = build(Path(directory) / "before", old), build(Path(directory) / "after", new)
        untouched = build(Path(directory) / "untouched", old)
        changed = changed_paths(before, after)
        patch, dropped = without_files(workspace_diff(before, after), wanted.__contains__)
        assert dropped == [path for path in changed if path not in wanted]
        if patch:
            command = ["git", "apply", "--whitespace=nowarn", "-"]
            done = subprocess.run(command, input=patch, cwd=before, capture_output=True)
            if done.returncode:  # a directory stands where a file that was dropped would have gone
                assert any(kept.startswith(f"{gone}/") for kept in wanted for gone in dropped)
                return
        assert changed_paths(untouched, before) == [path for path in changed if path in wanted]
