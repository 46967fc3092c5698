from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollouts_script import byte_tokenizer

from contracts.chat import CALL_END, CALL_START, parse_turn
from contracts.digests import canonical_json
from contracts.episodes import TokenRole
from inference.engines.base import Completion
from inference.rollouts.transcript import Transcript, policy_turns

TOKENIZER = byte_tokenizer()
PIECES = st.lists(st.tuples(st.booleans(), st.text(max_size=12), st.integers(0, 12)), max_size=8)


@given(st.text(max_size=20), PIECES)
def test_lists_stay_aligned_and_spans_cover_exactly_the_policy_tokens(
    prompt: str, pieces: list[tuple[bool, str, int]]
) -> None:
    transcript = Transcript(TOKENIZER.prompt([("user", prompt)]))
    said = TOKENIZER.decode(transcript.token_ids)
    for by_policy, text, cut in pieces:
        ids = TOKENIZER.encode_text(text)
        said += text
        if by_policy:
            middle = min(cut, len(ids))
            spans = [("one", 0, middle), ("two", middle, len(ids))]
            transcript.add_policy(Completion(ids, [-1.0] * len(ids), spans, "stop"))
        else:
            transcript.add_environment(ids)
    found = transcript.sequence()
    assert len(found.token_ids) == len(found.token_role) == len(found.logprobs) == len(transcript)
    covered = [position for _, start, end in found.policy_spans for position in range(start, end)]
    policy = [place for place, role in enumerate(found.token_role) if role == TokenRole.POLICY]
    assert covered == policy
    assert [place for place, value in enumerate(found.logprobs) if value is not None] == policy
    assert [place for start, end in policy_turns(found) for place in range(start, end)] == policy
    assert TOKENIZER.decode(found.token_ids) == said


@given(st.text() | st.recursive(st.floats() | st.text() | st.integers(), st.lists).map(json.dumps))
def test_no_text_makes_reading_a_turn_fail(body: str) -> None:
    for text in (body, f"{CALL_START}{body}{CALL_END}", f'{CALL_START}{{"name":"x","arguments":{body}}}{CALL_END}'):
        turn = parse_turn(text)
        assert turn.error is None or not turn.calls
        assert all(json.loads(canonical_json(call.arguments)) == call.arguments for call in turn.calls)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", '"\\ud800"', "9" * 5000])
def test_arguments_that_cannot_be_written_down_are_a_format_error(value: str) -> None:
    turn = parse_turn(f'{CALL_START}{{"name":"read","arguments":{{"path":{value}}}}}{CALL_END}')
    assert turn.error == "tool call is not JSON"
