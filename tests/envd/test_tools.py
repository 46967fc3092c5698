from __future__ import annotations

import asyncio
import functools
import json
import os
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.pb import envd_operations_pb2 as pb
from envd.errors import EnvdError
from envd.operations.client import OperationsClient
from envd.tools import MAX_OUTPUT_BYTES, TOOLSETS, Output, ToolSpec, toolset_named
from envd.types import ToolCall
from tests.envd.harness import FILES, Harness
from tests.envd.local_tools import run_file_tool


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


def nested(levels: int) -> object:
    """A list in a list, and so on."""
    return functools.reduce(lambda inner, _: [inner], range(levels), cast(object, 0))


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
        ("read", {"path": "x", "start": 2.0}, "error: read: start must be an integer"),
        ("read", {"path": ["x"]}, "error: read: path must be a string"),
        ("read", {"path": nested(33)}, "error: read: path must be a string"),
        ("submit_answer", {"answer": nested(33)}, "error: submit_answer: answer is nested more than 32 levels deep"),
        ("submit_answer", {"answer": "x" * 65_536}, "error: an answer takes at most 65536 bytes of JSON"),
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


def test_a_sandbox_answers_as_a_local_directory_does(anywhere: Harness, root: Path) -> None:
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
    for spec in [spec for toolset in TOOLSETS.values() for spec in toolset.tools.values()]:
        assert spec.parameters["type"] == "object" and spec.parameters["additionalProperties"] is False
        assert set(spec.parameters["required"]) <= set(spec.parameters["properties"])
        assert spec.json_schema()["function"]["name"] == spec.name


def test_nested_arguments_are_checked_by_the_schema_of_the_tool() -> None:
    row = {"type": "object", "properties": {"count": {"type": "integer", "minimum": 1}}, "required": ["count"]}
    properties = {"rows": {"type": "array", "items": row}, "mode": {"enum": ["add", "set"]}}
    spec = ToolSpec("put", "", {"type": "object", "properties": properties, "required": ["rows"]})
    assert spec.wrong({"rows": [{"count": 1}], "mode": "add"}) is None
    assert spec.wrong({"rows": [{"count": 1}, {"count": 2.0}]}) == "rows[1].count must be an integer"
    assert spec.wrong({"rows": [{"count": 0}]}) == "rows[0].count must satisfy minimum 1"
    assert spec.wrong({"rows": [{}]}) == "rows[0] must satisfy required ['count']"
    assert spec.wrong({"rows": [], "mode": "drop"}) == "mode must satisfy enum ['add', 'set']"


@pytest.mark.parametrize("answer", ["42", 4.5, None, True, {"rows": [1, {"a": []}]}, nested(32)])
def test_any_json_value_is_an_answer(root: Path, answer: object) -> None:
    assert run(root, "submit_answer", answer=answer) == (True, "submitted")


def test_an_unknown_toolset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(EnvdError, match="no toolset 'fly': use one of default, files, answer"):
        toolset_named("fly")


def test_a_sandbox_offers_its_toolset_alone_and_so_do_its_copies(namespaces: Harness) -> None:
    calls = [
        ToolCall("list", {}),
        ToolCall("exec", {"command": "true"}),
        ToolCall("submit_answer", {"answer": {"rows": [[1, None], []]}}),
        ToolCall("submit_answer", {"answer": nested(5000)}),
        ToolCall("submit_answer", {}),
    ]
    absent, deep = "error: no such tool: ", "error: submit_answer: answer is nested more than 32 levels deep"
    said = {
        "": ["a.py", "exit 0", *[absent + "submit_answer"] * 3],
        "files": ["a.py", absent + "exec", *[absent + "submit_answer"] * 3],
        "answer": ["a.py", "exit 0", "submitted", deep, "error: submit_answer: missing argument: answer"],
    }

    async def job() -> None:
        async with OperationsClient(namespaces.address) as client:
            template = await client.put_template({"a.py": b"x = 1\n"})
            for toolset, expected in said.items():
                async with await client.create(template, toolset=toolset) as sandbox:
                    copies = [sandbox]
                    if toolset == "files":
                        copies += [await sandbox.fork(), await client.restore((await sandbox.snapshot())[0])]
                    for copy in copies:
                        assert [result.text for result in await copy.batch(calls)] == expected
                        await copy.close()
                reply = await client.ask("operations.Schemas", pb.SchemasRequest(toolset=toolset))
                shown = [tool["function"]["name"] for tool in json.loads(reply.tools_json)]
                assert shown == list(toolset_named(toolset).tools)
            with pytest.raises(EnvdError, match="no toolset 'fly'"):
                await client.create(template, toolset="fly")

    asyncio.run(job())
