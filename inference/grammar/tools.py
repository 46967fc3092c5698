"""Grammar of the calls of a toolset, as the chat template writes them."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

from contracts.chat import CALL_END, CALL_START, ChatTokenizer
from envd.tools import toolset_named
from inference.grammar.library import xgrammar

_DIGITS = '"-"? ("0" | [1-9] [0-9]{0,14})'
_RULES = {
    "basic_integer": _DIGITS,
    "basic_number": f'{_DIGITS} ("." [0-9]{{1,15}})?',
    "basic_escape": (
        r'([\"\\/bfnrt]) | ("u" [0-9A-CE-Fa-ce-f] [0-9A-Fa-f] [0-9A-Fa-f] [0-9A-Fa-f])'
        r' | ("u" [Dd] [0-7] [0-9A-Fa-f] [0-9A-Fa-f])'
    ),
}
"""In place of xgrammar's rules: numbers that every JSON reader holds, and no lone surrogates."""
_STRING = "basic_string_sub"
"""xgrammar's rule for the rest of a string, its closing quote included."""


def tools_grammar(tokenizer: ChatTokenizer, toolset: str = "") -> str:
    """Structural tag, as JSON text, of turns with any number of calls of this toolset's tools.

    Arguments stand in the order of the tool's schema, without blanks unless the template writes them. A call ends with
    the token of its markup, never with characters that look like it.
    """
    return _tools_grammar(toolset, tokenizer.call_end, tokenizer.spaced)


@functools.cache
def _tools_grammar(toolset: str, call_end: int, spaced: bool) -> str:
    colon, comma, glue = (": ", ", ", "\n") if spaced else (":", ",", "")
    tags = [
        {
            "type": "tag",
            "begin": CALL_START,
            "content": {
                "type": "sequence",
                "elements": [
                    _text(f'{glue}{{"name"{colon}{json.dumps(tool.name)}{comma}"arguments"{colon}'),
                    {"type": "grammar", "grammar": _arguments(tool.parameters, comma, colon)},
                    _text(f"}}{glue}"),
                ],
            },
            "end": {"type": "token", "token": call_end},
        }
        for tool in toolset_named(toolset).listed.values()
    ]
    turns = {"type": "triggered_tags", "triggers": [CALL_START], "tags": tags, "excludes": [CALL_END]}
    return json.dumps({"type": "structural_tag", "format": turns})


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _arguments(schema: Mapping[str, Any], comma: str, colon: str) -> str:
    """EBNF of the JSON objects of a schema."""
    grammar = xgrammar().Grammar.from_json_schema(json.dumps(schema), any_whitespace=False, separators=(comma, colon))
    rules = dict(line.split(" ::= ", 1) for line in str(grammar).splitlines() if line)
    rules |= {name: rule for name, rule in _RULES.items() if name in rules}
    if _STRING in rules:
        rules |= _strings_without(CALL_END)
    return "\n".join(f"{name} ::= {rule}" for name, rule in rules.items())


def _strings_without(text: str) -> dict[str, str]:
    """Rules of the rest of a JSON string that does not contain `text`, whose first character occurs in it once.

    One rule for each number of characters of `text` that were just written.
    """
    first = text[0]
    names = [_STRING, *(f"after_{count}" for count in range(1, len(text)))]
    rules = {}
    for count, name in enumerate(names):
        ways = [r'("\"")', rf'("\\" basic_escape {_STRING})', rf'("{first}" {names[1]})']
        ways.append(rf"([^\0-\x1f\"\\{first}{text[count] if count else ''}] {_STRING})")
        if 0 < count < len(names) - 1:
            ways.append(f'("{text[count]}" {names[count + 1]})')
        rules[name] = " | ".join(ways)
    return rules
