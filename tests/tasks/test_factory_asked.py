"""Bugs that a language model makes by changing functions, asked over a real HTTP server."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from typing import Any

import pytest

from contracts.errors import InfraFault
from contracts.store import Store, open_store
from curation.endpoint import Endpoint
from curation.errors import CurationError, TaskError
from curation.tasks.factory.functions import Function, Lines, Source
from curation.tasks.factory.make import MakeConfig, make_suite
from curation.tasks.factory.source import Repository
from curation.tasks.factory.strategies import Candidate, Context, changed_text
from curation.tasks.factory.strategies.asked import FEATURE, REWRITE, Model, ask_for_candidates, candidate_of
from curation.tasks.importing.splits import DEFAULT_SHARES
from tests.curation.judge_server import Reply, judge_server, said

TEXT = '''\
def total(values, start=0):
    """Sum of values."""
    found = start
    for value in values:
        found += value
    return found


class Box:
    @property
    def size(self):
        width = self.width
        return width * self.height


def one(): return 1
'''


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def functions() -> dict[str, Function]:
    data = TEXT.encode()
    return {each.qualname: each for each in Source("pack/core.py", data, ast.parse(data)).functions}


def context(seed: int = 0) -> Context:
    return Context(Repository("pack", "pack", {}, "MIT"), list(functions().values()), Lines({}), seed)


def body_of(candidate: Candidate | None, function: Function) -> str:
    assert candidate is not None
    return changed_text(function, candidate.edits)


@pytest.mark.parametrize(
    "reply",
    [
        "```python\ndef total(values, start=0):\n    return sum(values)\n```",
        'Here:\n```py\nimport math\n\ndef total(values, start=0):\n    """Other."""\n    return sum(values)\n```\nBye',
        "def total(values, start=0):\n    return sum(values)\n",
        "```\n    def total(values, start=0):\n        return sum(values)\n```",
    ],
)
def test_signature_and_docstring_stay_and_the_body_is_the_replys(reply: str) -> None:
    function = functions()["total"]
    assert body_of(candidate_of(REWRITE, function, reply), function) == (
        'def total(values, start=0):\n    """Sum of values."""\n    return sum(values)'
    )


def test_a_method_keeps_its_indentation() -> None:
    function = functions()["Box.size"]
    reply = "```python\nclass Box:\n    def size(self):\n        if self:\n            return self.width\n```"
    assert body_of(candidate_of(REWRITE, function, reply), function) == (
        "    @property\n    def size(self):\n        if self:\n            return self.width"
    )


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "I can't do that.",
        "```python\ndef other():\n    return 1\n```",
        "```python\ndef total(values:\n```",
        f"```python\n{TEXT}```",  # as it was
        "```python\n" + "(" * 5000 + "\n```",
    ],
)
def test_other_replies_are_no_candidates(reply: str) -> None:
    for strategy in (REWRITE, FEATURE):
        assert candidate_of(strategy, functions()["total"], reply) is None
    assert candidate_of(REWRITE, functions()["total"], "def total(values, start=0): return 0") is None  # no body


def test_a_feature_may_change_signature_and_docstring_but_no_decorator() -> None:
    function = functions()["Box.size"]
    reply = '```python\n@cached\ndef size(self, unit=1):\n    """In units."""\n    return self.width // unit\n```'
    assert body_of(candidate_of(FEATURE, function, reply), function) == (
        '    @property\n    def size(self, unit=1):\n        """In units."""\n        return self.width // unit'
    )


def ask(store: Store, url: str, wanted: int, unused: dict[str, str] | None = None) -> list[Candidate]:
    model = Model(name="writer", endpoint=Endpoint(url=url, attempts=1))
    asked = context()
    found = asyncio.run(ask_for_candidates(REWRITE, asked, wanted, model, store, lambda done, total: None))
    if unused is not None:
        unused.update(asked.unused)
    return found


def test_nothing_is_asked_twice_and_a_refused_function_is_left_out(store: Store) -> None:
    def behave(path: str, body: dict[str, Any]) -> Reply:
        asked = body["messages"][1]["content"]
        if "Box.size" in asked.split("\n")[0]:
            return 400, "too long"
        assert "found += value" not in asked and "self.width" in asked  # the others' bodies stay
        return said(f"```python\ndef total(values, start=0):\n    return sum(values) + {body['seed']}\n```")

    with judge_server(behave) as server:
        unused: dict[str, str] = {}
        found = ask(store, f"{server.url}/v1", 8, unused)
        asked = len(server.asked)
        assert [each.function for each in found] == ["pack/core.py::total"] * 4
        assert len({each.identity for each in found}) == 4 and asked == 8
        assert unused == {
            "rewrite pack/core.py::Box.size": "rewrite: no reply changes it",
            "rewrite pack/core.py::one": "rewrite: its body is one statement",
        }
        again = ask(store, f"{server.url}/v1", 8)
        assert [each.identity for each in again] == [each.identity for each in found]
        assert len(server.asked) == asked + 4  # a refusal is no answer
        assert {body["model"] for body in server.asked} == {"writer"}


def test_an_endpoint_that_is_down_or_wrong_is_one_clear_error(store: Store) -> None:
    with pytest.raises(InfraFault, match=r"^strategy rewrite: http://127.0.0.1:9/v1/chat/completions failed 1 times"):
        ask(store, "http://127.0.0.1:9/v1", 4)
    with (
        judge_server(lambda path, body: (404, "no such model")) as server,
        pytest.raises(CurationError, match=r"answered 404 .*check endpoint.url and the model's name"),
    ):
        ask(store, f"{server.url}/v1", 4)


def test_the_strategy_without_a_model_is_refused_before_anything_is_read(store: Store) -> None:
    config = MakeConfig(4, ("mutate", "feature"))
    with pytest.raises(
        TaskError, match="the strategy feature needs a language model: name it by --endpoint and --model"
    ):
        asyncio.run(make_suite("nowhere", config, DEFAULT_SHARES, store, None))  # type: ignore[arg-type]
