"""Messages that are sent in parts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.chat import CALL_END, CALL_START, TURN_END
from inference.server.chat import MessageParts, answer_message


@pytest.mark.parametrize("call", ["", f'{CALL_START}{{"name": "read", "arguments": {{}}}}{CALL_END}'])
@given(text=st.text(alphabet="ab\n<|tool_call>im_end"), cuts=st.lists(st.integers(0, 60)), ended=st.booleans())
def test_parts_of_any_message_are_the_message(call: str, text: str, cuts: list[int], ended: bool) -> None:
    said = f"{text}{call}{TURN_END * ended}"
    parts, sent = MessageParts(), ""
    places = sorted({0, len(said), *(cut for cut in cuts if cut < len(said))})
    for first, last in itertools.pairwise(places):
        sent += parts.add(said[first:last])
    left, reason = parts.end("id")
    message, expected = answer_message(said, "id")
    assert (sent + left["content"], reason) == (message["content"] or "", expected)
    assert [{"index": 0, **each} for each in message.get("tool_calls", ())] == left.get("tool_calls", [])


def test_content_is_sent_as_soon_as_it_can_be_no_markup() -> None:
    parts = MessageParts()
    assert [parts.add(text) for text in ("a\n", "b<", "tool", "x", f"\n{CALL_START}")] == ["a", "\nb", "", "<toolx", ""]
