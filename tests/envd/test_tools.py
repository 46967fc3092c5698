from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envd.tools import MAX_OUTPUT_BYTES, TOOLS, Output, run_file_tool
from envd.types import ToolCall
from tests.envd.harness import FILES, Harness


def run(root: Path, name: str, **arguments: object) -> tuple[bool, str]:
    result = run_file_tool(root, ToolCall(name, arguments))
    return result.ok, result.text


@pytest.fixture
def root(tmp_path: Path) -> Path:
    workspace = tmp_path / "workspace"
    for path, content in FILES.items():
        (workspace / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace / path).write_bytes(content)
    return workspace


def test_read_numbers_lines_without_padding(root: Path) -> None:
    assert run(root, "read", path="calc.py") == (True, "1 def add(a, b):\n2     return a - b")
    assert run(root, "read", path="calc.py", start=2, end=9) == (True, "2     return a - b")
    assert run(root, "read", path="/workspace/calc.py", end=1) == (True, "1 def add(a, b):")
    assert run(root, "read", path="calc.py", start=3) == (False, "error: calc.py has 2 lines")


def test_write_creates_parents_and_overwrites(root: Path) -> None:
    assert run(root, "write", path="a/b/c.txt", content="x\n") == (True, "ok")
    assert run(root, "write", path="a/b/c.txt", content="y") == (True, "ok")
    assert (root / "a/b/c.txt").read_text() == "y"
    assert run(root, "write", path="a", content="") == (False, "error: is a directory: a")
    assert run(root, "write", path="calc.py/x", content="") == (False, "error: not a directory: calc.py/x")


def test_edit_replaces_a_line_by_several(root: Path) -> None:
    assert run(root, "edit", path="calc.py", line=2, new="    c = a + b\n    return c\n") == (True, "ok")
    assert (root / "calc.py").read_text() == "def add(a, b):\n    c = a + b\n    return c\n"
    assert run(root, "edit", path="calc.py", line=4, new="x") == (False, "error: calc.py has 3 lines")


def test_edit_by_text_needs_a_unique_match(root: Path) -> None:
    assert run(root, "edit", path="calc.py", old="a - b", new="a + b") == (True, "ok")
    assert run(root, "edit", path="calc.py", old="a", new="z")[1].startswith("error: old occurs ")
    assert run(root, "edit", path="calc.py", old="gone", new="z") == (False, "error: old not found in calc.py")
    assert run(root, "edit", path="calc.py", new="z") == (False, "error: edit: give either line or old")


def test_list_is_sorted_and_leaves_out_what_git_and_python_keep(root: Path) -> None:
    (root / ".git").mkdir()
    (root / "__pycache__").mkdir()
    assert run(root, "list") == (True, "calc.py\ntests/\ntests/test_calc.py")
    assert run(root, "list", depth=1) == (True, "calc.py\ntests/")
    assert run(root, "list", path="tests") == (True, "tests/test_calc.py")


def test_search_gives_path_line_and_text(root: Path) -> None:
    assert run(root, "search", pattern=r"add\(1, \d\)") == (True, "tests/test_calc.py:5:     assert add(1, 2) == 3")
    assert run(root, "search", pattern="nowhere") == (True, "no matches")
    assert run(root, "search", pattern="(")[1].startswith("error: bad pattern: ")


@pytest.mark.parametrize("path", ["../secret", "/../../secret", "link", "tests/up/secret", "loop"])
def test_no_path_leaves_the_workspace(root: Path, path: str) -> None:
    (root.parent / "secret").write_text("secret")
    (root / "link").symlink_to(root.parent / "secret")
    (root / "tests/up").symlink_to("../..")
    (root / "loop").symlink_to("loop")
    for name, more in (("read", {}), ("edit", {"line": 1, "new": "x"}), ("search", {"pattern": "secret"})):
        ok, text = run(root, name, path=path, **more)
        assert not ok and text.startswith("error: ")
    run(root, "write", path=path, content="overwritten")
    assert (root.parent / "secret").read_text() == "secret"


def test_a_fifo_does_not_hang_a_tool(root: Path) -> None:
    os.mkfifo(root / "fifo")
    assert run(root, "read", path="fifo") == (False, "error: not a regular file: fifo")
    assert run(root, "write", path="fifo", content="x") == (False, "error: not a regular file: fifo")
    assert run(root, "search", pattern="x")[0]


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("fly", {}, "error: no such tool: fly"),
        ("read", {}, "error: read: missing argument: path"),
        ("read", {"path": 3}, "error: read: path must be a string"),
        ("read", {"path": "x", "start": True}, "error: read: start must be an integer"),
        ("read", {"path": "x", "colour": 1}, "error: read: unknown argument: colour"),
        ("read", {"path": "gone.py"}, "error: no such file: gone.py"),
        ("read", {"path": "a\0b"}, "error: read: path holds a null character"),
        ("exec", {"command": "ls"}, "error: exec needs a sandbox"),
        ("exec", {"command": "ls", "timeout_s": 10**400}, "error: exec: timeout_s must be at most 86400"),
        ("exec", {"command": "ls", "timeout_s": float("nan")}, "error: exec: timeout_s must be at most 86400"),
    ],
)
def test_bad_calls_are_answered_in_one_line(root: Path, name: str, arguments: dict[str, object], text: str) -> None:
    result = run_file_tool(root, ToolCall(name, arguments))
    assert (result.ok, result.text) == (False, text)


def test_bytes_that_are_no_text_survive_an_edit(root: Path) -> None:
    (root / "latin").write_bytes(b"caf\xe9\nx\n")
    assert run(root, "edit", path="latin", line=2, new="y") == (True, "ok")
    assert (root / "latin").read_bytes() == b"caf\xe9\ny\n"


@given(st.lists(st.binary(max_size=200), max_size=30), st.integers(2, 400))
@settings(max_examples=50)
def test_output_is_bounded_and_does_not_depend_on_chunks(chunks: list[bytes], limit: int) -> None:
    whole, pieces = Output(limit), Output(limit)
    whole.feed(b"".join(chunks))
    for chunk in chunks:
        pieces.feed(chunk)
    assert whole.text() == pieces.text()
    assert whole.true_bytes == sum(map(len, chunks))
    if whole.truncated:
        assert f"of {whole.true_bytes} bytes cut" in whole.text()


def test_long_output_keeps_head_and_tail_and_states_its_size(root: Path) -> None:
    run(root, "write", path="long", content="".join(f"line {n}\n" for n in range(20_000)))
    result = run_file_tool(root, ToolCall("read", {"path": "long"}))
    assert result.truncated and result.true_bytes > 200_000 and len(result.text) < MAX_OUTPUT_BYTES + 100
    assert result.text.startswith("1 line 0\n") and result.text.endswith("20000 line 19999")
    assert f"of {result.true_bytes} bytes cut" in result.text


def test_a_sandbox_answers_as_the_pure_functions_do(anywhere: Harness, root: Path) -> None:
    calls = [
        ToolCall("list", {}),
        ToolCall("read", {"path": "calc.py"}),
        ToolCall("edit", {"path": "calc.py", "line": 2, "new": "    return a + b"}),
        ToolCall("search", {"pattern": "add"}),
        ToolCall("write", {"path": "new/é.py", "content": "x = 1\n"}),
        ToolCall("read", {"path": "new/é.py"}),
        ToolCall("read", {"path": "/etc/passwd"}),
        ToolCall("fly", {}),
    ]
    assert anywhere.calls(*calls) == [run_file_tool(root, call) for call in calls]


def test_every_schema_is_a_closed_object_for_grammars() -> None:
    for spec in TOOLS.values():
        assert spec.parameters["type"] == "object" and spec.parameters["additionalProperties"] is False
        assert set(spec.parameters["required"]) <= set(spec.parameters["properties"])
        assert spec.json_schema()["function"]["name"] == spec.name
