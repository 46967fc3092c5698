"""Grade an answer by the rule of its task. Pure: no sandbox takes part."""

from __future__ import annotations

import json
import math
import re
import unicodedata

from pydantic import JsonValue

from contracts.final_states import AnswerState, answer_bytes, answer_in
from envd.client import TestOutcome, VerifyResult

NAME = "answer"
"""Name of the only check of an answer."""
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_MAX_DIGITS = 400
"""Longest text that is read as a number; a float has at most 309 digits before its point."""


def grade_answer(expected: AnswerState, state: bytes) -> VerifyResult:
    """Result of one check, named NAME. state: as `contracts.final_states.final_answer` gives it."""
    answer = answer_in(state)
    if answer is None:
        why = "no answer was given"
    else:
        why = "" if _RULES[expected.rule](expected, answer[0]) else f"not the answer by rule {expected.rule}"
    return VerifyResult((TestOutcome(NAME, "failed" if why else "passed", why),), "completed", "")


def answer_cheats(instruction: str) -> dict[str, bytes]:
    """States, by name, that try to pass without an answer."""
    return {
        "empty": answer_bytes(""),
        "null": answer_bytes(None),
        "not_a_number": answer_bytes("nan"),
        "instruction": answer_bytes(instruction),
    }


def _exact(expected: AnswerState, answer: JsonValue) -> bool:
    return isinstance(answer, str) and answer == expected.expected


def _normalized(expected: AnswerState, answer: JsonValue) -> bool:
    return isinstance(answer, str) and _plain(answer) == _plain(str(expected.expected))


def _plain(text: str) -> str:
    """Text without case, with single spaces, in Unicode's form NFKC."""
    return " ".join(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).split())


def _json(expected: AnswerState, answer: JsonValue) -> bool:
    if isinstance(answer, str) and not isinstance(expected.expected, str):
        try:
            answer = json.loads(answer)
        except (ValueError, RecursionError):
            return False
    return json_equal(answer, expected.expected)


def json_equal(one: JsonValue, other: JsonValue) -> bool:
    """Whether two JSON values are the same. 1 and 1.0 are; 1 and true are not."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(json_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(json_equal, one, other))
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _number(expected: AnswerState, answer: JsonValue) -> bool:
    want, given = expected.expected, _number_of(answer)
    assert isinstance(want, int | float)
    if given is None:
        return False
    if isinstance(given, int) and isinstance(want, int) and given == want:
        return True
    try:
        distance = max(expected.absolute, expected.relative * abs(want))
        if not distance:
            return given == want
        return math.isfinite(given) and abs(given - want) <= distance
    except OverflowError:  # an integer beyond floats is far from every number within them
        return False


def _number_of(answer: JsonValue) -> int | float | None:
    """Number that an answer is, or that its text is as a whole."""
    if isinstance(answer, bool):
        return None
    if isinstance(answer, int | float):
        return answer
    text = answer.strip() if isinstance(answer, str) else ""
    if len(text) > _MAX_DIGITS or not _NUMBER.fullmatch(text):
        return None
    return int(text) if text.lstrip("+-").isdigit() else float(text)


_RULES = {"exact": _exact, "normalized": _normalized, "json": _json, "number": _number}
