"""Sequences that terminals obey are spelled out in what tools answer; interfaces for bytes give them as they are."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.visible import visible, visible_json
from envd.client import ToolCall
from envd.operations.client import ManagedSandbox
from envd.tools.output import MAX_OUTPUT_BYTES, Output
from tests.envd.harness import Harness

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b31m\x08\x7f\u202etxt.exe\r\x1b[1A"
SHOWN = "\\x1b]0;title\\x07\\x1b[2J\\x9b31m\\x08\\x7f\\u202etxt.exe\\x0d\\x1b[1A"


def harmless(text: str) -> bool:
    return all(each.isprintable() or each in "\t\n" or ord(each) > 0x9F for each in text.replace("\r\n", "\n"))


@given(st.text())
def test_what_is_shown_steers_no_terminal_and_is_shown_once(text: str) -> None:
    shown = visible(text)
    assert harmless(shown) and visible(shown) == shown
    assert not any(0x202A <= ord(each) <= 0x202E or 0x2066 <= ord(each) <= 0x2069 for each in shown)


@given(st.text(alphabet=st.characters(categories=["L", "M", "N", "P", "S", "Zs"], include_characters="\n\t")))
def test_ordinary_text_stays_as_it_is(text: str) -> None:
    assert visible(text) == text
    assert visible("one\r\ntwo\r\n") == "one\r\ntwo\r\n"


@given(st.recursive(st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_reads_as_the_same_value(value: object) -> None:
    text = visible_json(json.dumps(value, ensure_ascii=False))
    assert json.loads(text) == value and harmless(text)


@given(
    st.lists(
        st.binary(max_size=3000) | st.sampled_from([b"\x1b" * 4000, b"a" * 9000, "é\x9b".encode() * 700]), max_size=6
    )
)
def test_an_output_is_bounded_however_it_is_chunked(chunks: list[bytes]) -> None:
    whole, parts = Output(4096), Output(4096)
    whole.feed(b"".join(chunks))
    for chunk in chunks:
        parts.feed(chunk)
    text = whole.text()
    assert text == parts.text() and harmless(text) and len(text) <= 4096 + 64
    assert whole.truncated == ("bytes cut]" in text)


@pytest.mark.parametrize("backend", ["namespaces", "plain"])
def test_tools_show_what_files_and_programs_hold(request: pytest.FixtureRequest, backend: str) -> None:
    harness: Harness = request.getfixturevalue(backend)

    async def job(sandbox: ManagedSandbox) -> None:
        content = f"x = 1  # {HOSTILE}\n"
        await sandbox.files.write("a.py", content.encode())
        said = {
            "read": (await sandbox.call(ToolCall("read", {"path": "a.py"}))).text,
            "exec": (await sandbox.call(ToolCall("exec", {"command": "cat a.py"}))).text,
            "search": (await sandbox.call(ToolCall("search", {"pattern": "title"}))).text,
        }
        for name, text in said.items():
            assert SHOWN in text and harmless(text), name
        assert (await sandbox.files.read("a.py")) == content.encode()
        _, out, _ = await sandbox.processes.run(["cat", "a.py"])
        assert out == content.encode()
        await sandbox.files.write("b\x1b[2J.py", b"import os\n")
        for call in (
            ToolCall("list", {}),
            ToolCall("lint", {}),
            ToolCall("read", {"path": "c\x1b[2J"}),
            ToolCall("f\x1b[2J", {}),
        ):
            text = (await sandbox.call(call)).text
            assert harmless(text) and "\\x1b[2J" in text, call.name

    harness.sandbox(job)


def test_a_flood_of_control_characters_is_cut(plain: Harness) -> None:
    (text,) = plain.shell("head -c 16000 /dev/zero")
    assert len(text) <= MAX_OUTPUT_BYTES + 64 and "bytes cut]" in text and text.endswith("exit 0")
