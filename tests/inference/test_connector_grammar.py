"""The grammar of calls of connectors follows from their schemas: bounds, enumerations and types of arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contracts.chat import CALL_END, ChatTokenizer, ToolCallText, render_call
from curation.tokenizer import train_tokenizer
from envd.tools import check_arguments
from inference.grammar.compiled import Vocabulary, compiled
from inference.grammar.matcher import Matcher
from inference.grammar.tools import tools_grammar

TOOLSET = "files+sql+http+browse+python"
TAKEN = [
    ("sql", {"path": "a.db", "query": "select ?", "parameters": [1, "a", None, -2.5], "rows": 1000, "write": True}),
    ("sql", {"path": "a.db", "query": "select 'it''s <b>'", "rows": 1}),
    ("http", {"method": "GET", "url": "http://shop.test/"}),
    ("http", {"method": "PATCH", "url": "http://shop.test/", "headers": {"A": "b", "C": "d"}, "body": '{"x": "y"}'}),
    ("browse", {"action": "open", "url": "docs/index.html"}),
    ("browse", {"action": "submit", "number": 99_999, "fields": {"item": "tea"}}),
    ("python", {"code": "print('a')\n", "timeout_s": 3600}),
]
REFUSED = [
    ("sql", {"path": "a.db"}),
    ("sql", {"path": "a.db", "query": "x", "parameters": [True]}),
    ("sql", {"path": "a.db", "query": "x", "parameters": {"a": 1}}),
    ("sql", {"path": "a.db", "query": "x", "rows": 0}),
    ("sql", {"path": "a.db", "query": "x", "rows": 1001}),
    ("sql", {"path": "a.db", "query": "x", "write": 1}),
    ("http", {"method": "FLY", "url": "http://shop.test/"}),
    ("http", {"method": "get", "url": "http://shop.test/"}),
    ("http", {"method": "GET", "url": "http://shop.test/", "headers": {"A": 1}}),
    ("http", {"method": "GET", "url": "http://shop.test/", "redirect": True}),
    ("browse", {"action": "click"}),
    ("browse", {"action": "follow", "number": 0}),
    ("browse", {"action": "follow", "number": 100_000}),
    ("browse", {"action": "follow", "number": 1.5}),
    ("python", {"code": "1", "timeout_s": 3601}),
    ("python", {}),
    ("exec", {"command": "ls"}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = train_tokenizer(['{"name":"read","arguments":{"path":"a.py"}}\n'] * 40, ["read", "path"], 400)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    return folder


def refused_at(folder: Path, name: str, arguments: dict[str, Any], spaced: bool) -> str | None:
    """What of a call's text the grammar allows, where it does not allow all."""
    chat = ChatTokenizer.from_directory(folder, spaced=spaced)
    grammar = compiled(tools_grammar(chat, TOOLSET), Vocabulary.of(folder / "tokenizer.json", 400), (chat.end_of_turn,))
    matcher = Matcher(grammar, 400)
    taken: list[int] = []
    for token in chat.policy_turn([ToolCallText(name, arguments)]):
        mask = matcher.mask()
        if mask is not None and not mask[token]:
            return chat.decode(taken)
        matcher.accept(token)
        taken.append(token)
    return None


@pytest.mark.parametrize("spaced", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "arguments"), TAKEN)
def test_the_grammar_takes_each_valid_call(folder: Path, name: str, arguments: dict[str, Any], spaced: bool) -> None:
    assert check_arguments(name, arguments) is None
    assert refused_at(folder, name, arguments, spaced) is None


@pytest.mark.parametrize(("name", "arguments"), REFUSED)
def test_the_grammar_refuses_each_wrong_call_where_it_goes_wrong(
    folder: Path, name: str, arguments: dict[str, Any]
) -> None:
    assert name == "exec" or check_arguments(name, arguments) is not None
    before = refused_at(folder, name, arguments, False)
    assert before is not None and render_call(ToolCallText(name, arguments)).startswith(before)
    assert len(before) < len(render_call(ToolCallText(name, arguments))) - len(CALL_END) + 1, json.dumps(arguments)
