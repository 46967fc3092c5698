"""Messages that are sent in parts."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.chat import CALL_END, CALL_START, END_OF_TEXT, TURN_END
from inference.server.chat import MessageParts, answer_message


@pytest.mark.parametrize("arguments", ["", "{}", '{"x": "\\ud83d"}'])
@given(
    text=st.text(alphabet="ab\n<|tool_call>im_endftx"),
    cuts=st.lists(st.integers(0, 60)),
    end=st.sampled_from(["", TURN_END, END_OF_TEXT]),
)
def test_parts_of_any_message_are_the_message(arguments: str, text: str, cuts: list[int], end: str) -> None:
    call = f'{CALL_START}{{"name": "read", "arguments": {arguments}}}{CALL_END}' if arguments else ""
    said = f"{text}{call}{end}"
    parts, sent = MessageParts(), ""
    places = sorted({0, len(said), *(cut for cut in cuts if cut < len(said))})
    for first, last in itertools.pairwise(places):
        sent += parts.add(said[first:last])
    left, reason = parts.end("id")
    message, expected = answer_message(said, "id")
    assert (sent + left["content"], reason) == (message["content"] or "", expected)
    assert [{"index": 0, **each} for each in message.get("tool_calls", ())] == left.get("tool_calls", [])
    assert json.dumps(message, ensure_ascii=False).encode()


@pytest.mark.parametrize("end", [TURN_END, END_OF_TEXT])
def test_the_token_that_stops_a_message_is_no_content(end: str) -> None:
    parts = MessageParts()
    assert answer_message(f"done{end}", "id")[0]["content"] == "done"
    assert [parts.add(f"done{end[:5]}"), parts.add(end[5:]), parts.end("id")[0]["content"]] == ["done", "", ""]


def test_content_is_sent_as_soon_as_it_can_be_no_markup() -> None:
    parts = MessageParts()
    assert [parts.add(text) for text in ("a\n", "b<", "tool", "x", f"\n{CALL_START}")] == ["a", "\nb", "", "<toolx", ""]
