"""Prompts of judges and reward models: a template whose placeholders are filled with parts of the episode, as data.

The judged policy writes the episode's text. So each part stands between marks that contain a digest of all parts, which
no part can contain, and all control tokens of chat templates are broken up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from contracts.digests import digest_of

PARTS = ("task", "diff", "transcript", "reference")
"""Placeholders of a template."""

JUDGE_TEMPLATE = """A coding agent was asked:
{task}
What it did, turn by turn:
{transcript}
The change it left behind:
{diff}
How well does the change do what was asked, and would a careful maintainer accept it as it is?"""

MODEL_TEMPLATE = "{transcript}\n\n{diff}"
"""The transcript begins with the agent's task."""

_PLACE = re.compile(r"\{([a-z_]+)\}")
_CONTROL = re.compile(r"<(?=[|｜])|<(?=/?(?:s|bos|eos|start_of_turn|end_of_turn)>)|\[(?=/?INST\])")
"""Beginning of a control token of common chat templates: <|im_end|>, <｜User｜>, </s>, <end_of_turn>, [/INST]."""


def check_template(template: str) -> None:
    """Raise ValueError for an unknown placeholder, or for a template without any."""
    places = _PLACE.findall(template)
    unknown = next((place for place in places if place not in PARTS), None)
    if unknown is not None:
        raise ValueError(f"template names {{{unknown}}}: known are {', '.join(f'{{{part}}}' for part in PARTS)}")
    if not places:
        raise ValueError(
            "template uses no part of the episode, so all scores would be equal: add e.g. {task} and {diff}"
        )


def places_of(template: str) -> set[str]:
    """Parts that a template uses."""
    return set(_PLACE.findall(template))


def fill(template: str, parts: Mapping[str, str], max_chars: int) -> str:
    """Template with its placeholders filled; parts are shortened to `max_chars` and their control tokens
    neutralized.
    """
    shown = _shown(template, parts, max_chars)
    return _PLACE.sub(lambda place: shown[place[1]], template)


def fill_fenced(template: str, parts: Mapping[str, str], max_chars: int) -> tuple[str, str]:
    """(`fill`, with each part between two marked lines; the mark)."""
    shown = _shown(template, parts, max_chars)
    mark = fence_mark(shown)
    fenced = {name: f"[begin {name} {mark}]\n{text}\n[end {name} {mark}]" for name, text in shown.items()}
    return _PLACE.sub(lambda place: fenced[place[1]], template), mark


def _shown(template: str, parts: Mapping[str, str], max_chars: int) -> dict[str, str]:
    return {name: neutral(shorten(parts[name], max_chars)) for name in places_of(template)}


def fence_mark(parts: Mapping[str, str]) -> str:
    """Sixteen hex digits that depend on every part, so that no part can contain them."""
    return digest_of(dict(parts))[:16]


def neutral(text: str) -> str:
    """Text with a blank inside each control token, so that a server reads it as text."""
    return _CONTROL.sub(lambda found: f"{found[0]} ", text)


def shorten(text: str, limit: int) -> str:
    """Shorten a text beyond `limit` to its beginning and end, with the length of the omitted middle."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
