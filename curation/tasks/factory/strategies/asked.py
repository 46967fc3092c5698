"""Strategies `rewrite` and `feature`: a language model changes functions, and what it breaks is a bug.

    rewrite    it sees the function's file without the body, and writes it anew (SWE-smith's LM rewrite)
    feature    it sees the file, and adds something to the function that nobody asked for (as BugPilot's agents do)

Replies are kept in the store: a killed command asks nothing twice, and the same store gives the same suite.
"""

from __future__ import annotations

import ast
import asyncio
import math
import re
import textwrap
from collections.abc import Callable
from itertools import islice
from typing import Any

from contracts.artifacts import Frozen
from contracts.store import Store
from contracts.syntax import parse_python
from curation.endpoint import Endpoint
from curation.errors import RequestRefused
from curation.rewards.answers import Answer, Answers
from curation.rewards.endpoint import EndpointClient
from curation.rewards.judges import judge_answer
from curation.tasks.factory.choose import in_turns
from curation.tasks.factory.functions import Function, FunctionNode
from curation.tasks.factory.strategies import Candidate, Context, Edit, changed_text, normalized

REWRITE, FEATURE = "rewrite", "feature"
ASKED = (REWRITE, FEATURE)
"""Strategies that need a model."""
_SHORTEST = 2
"""Statements of a body that is worth changing."""
_MOST = 4
"""Replies asked for one function."""
_AROUND = 8_000
"""Characters of the file that the model sees, before the function and after it."""
_MAX_TOKENS = 2_048
_SYSTEM = (
    "You write one Python function. Reply with the complete function in one ```python block, with the same name"
    " and nothing else."
)
_ASKED = {
    REWRITE: "In {path}, {name} has lost its body. Write it.",
    FEATURE: (
        "In {path}, add a small feature to {name}: an optional parameter, another kind of input, a cache, a shortcut, a"
        " check. Invent it, and write it as a colleague in a hurry would."
    ),
}
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class Model(Frozen):
    """Language model behind an OpenAI-compatible endpoint."""

    name: str
    """Model name at the endpoint."""
    endpoint: Endpoint


async def ask_for_candidates(
    strategy: str, context: Context, wanted: int, model: Model, store: Store, report: Callable[[int, int], None]
) -> list[Candidate]:
    """Candidates of up to `wanted` replies. strategy: one of ASKED. report: called with (replies, replies asked for).
    `context.unused` gets the functions without any, with the reason.

    Raises InfraFault if the endpoint keeps failing, CurationError if it refuses all requests.
    """
    functions = [each for each in context.functions if len(each.body) >= _SHORTEST]
    each_asked = min(_MOST, context.most, math.ceil(wanted / max(1, len(functions))))
    order = in_turns(functions, lambda each: each.source.path)
    asked = [(function, sample) for function in islice(order, wanted) for sample in range(each_asked)][:wanted]
    client, answers, done = EndpointClient(f"strategy {strategy}", model.endpoint), Answers(store), 0

    async def one(function: Function, sample: int) -> Candidate | None:
        nonlocal done
        question = _question(strategy, model.name, function, context.seed * _MOST + sample)
        try:
            answer = await answers.ask(
                {"kind": strategy, "request": question},
                client.slots,
                lambda: client.post("/chat/completions", question, judge_answer),
            )
        except RequestRefused:
            answer = Answer(text="", served="")
        done += 1
        report(done, len(asked))
        return candidate_of(strategy, function, answer.text)

    try:
        async with asyncio.TaskGroup() as group:
            work = [group.create_task(one(*each)) for each in asked]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        await client.close()
    found = [candidate for each in work if (candidate := each.result()) is not None]
    answered = {each.function for each in found}
    reasons = {each.key: "its body is one statement" for each in context.functions if len(each.body) < _SHORTEST}
    reasons |= {each.key: "no reply changes it" for each, _ in asked if each.key not in answered}
    context.unused.update({f"{strategy} {key}": f"{strategy}: {reason}" for key, reason in reasons.items()})
    return found


def candidate_of(strategy: str, function: Function, reply: str) -> Candidate | None:
    """The function as a reply changes it; None if the reply has no such function, or has the same one.

    rewrite: signature, decorators and docstring stay. feature: decorators stay.
    """
    text = textwrap.dedent(next(iter(_BLOCK.findall(reply)), reply))
    node = _found(text, function.qualname.rpartition(".")[2])
    if node is None:
        return None
    source, body = function.source, function.body
    first, last = (body[0], body[-1]) if strategy == REWRITE else (function.node, function.node)
    said = _after_docstring(node) if strategy == REWRITE else [node]
    if not said or (strategy == REWRITE and said[0].lineno == node.lineno):
        return None
    lines = textwrap.dedent("\n".join(text.split("\n")[said[0].lineno - 1 : said[-1].end_lineno]))
    changed = textwrap.indent(lines, " " * first.col_offset).lstrip(" ")
    edit = Edit(source.path, source.span(first)[0], source.span(last)[1], changed)
    before, after = normalized(changed_text(function, ())), normalized(changed_text(function, [edit]))
    if after is None or after == before:
        return None
    return Candidate(strategy, f"{strategy}_function", function.key, (edit,))


def _found(text: str, name: str) -> FunctionNode | None:
    """The first function of this name in a text."""
    try:
        module = parse_python(text)
    except (SyntaxError, ValueError):
        return None
    return next((each for each in ast.walk(module) if isinstance(each, FunctionNode) and each.name == name), None)


def _after_docstring(node: FunctionNode) -> list[ast.stmt]:
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


def _question(strategy: str, model: str, function: Function, seed: int) -> dict[str, Any]:
    """Body of POST /chat/completions."""
    source, body = function.source, function.body
    start, end = source.span(body[0])[0], source.span(body[-1])[1]
    shown = "..." if strategy == REWRITE else source.data[start:end].decode()
    text = f"{source.data[:start].decode()[-_AROUND:]}{shown}{source.data[end:].decode()[:_AROUND]}"
    asked = _ASKED[strategy].format(path=source.path, name=function.qualname)
    return {
        "model": model,
        "messages": [
            {"role": "system", "content": _SYSTEM},
            {"role": "user", "content": f"{asked}\n\n```python\n{text}\n```"},
        ],
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": _MAX_TOKENS,
    }
