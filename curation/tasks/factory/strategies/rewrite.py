"""Strategy `rewrite`: a language model writes functions anew, and what it gets wrong is a bug (SWE-smith's LM rewrite).

It sees the function's file without the body. Replies are kept in the store: a killed command asks nothing twice, and
the same store gives the same suite.
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
from curation.errors import RequestRefused
from curation.rewards.answers import Answer, Answers
from curation.rewards.config import Endpoint
from curation.rewards.endpoint import EndpointClient
from curation.rewards.judges import judge_answer
from curation.tasks.factory.choose import in_turns
from curation.tasks.factory.functions import Function, FunctionNode
from curation.tasks.factory.strategies import Candidate, Context, Edit, changed_text, normalized

NAME = "rewrite"
_SHORTEST = 2
"""Statements of a body that is worth writing anew."""
_MOST = 4
"""Replies asked for one function."""
_AROUND = 8_000
"""Characters of the file that the model sees, before the function and after it."""
_MAX_TOKENS = 2_048
_SYSTEM = (
    "You write one Python function. Reply with the complete function in one ```python block, with the same name,"
    " parameters and decorators, and with nothing else."
)
_ASKED = "In {path}, {name} has lost its body. Write it.\n\n```python\n{text}\n```"
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


class Model(Frozen):
    """Language model behind an OpenAI-compatible endpoint."""

    name: str
    """Model name at the endpoint."""
    endpoint: Endpoint


async def rewritten(
    context: Context, wanted: int, model: Model, store: Store, report: Callable[[int, int], None]
) -> list[Candidate]:
    """Candidates of up to `wanted` replies. report: called with (replies, replies asked for).

    Raises InfraFault if the endpoint keeps failing, CurationError if it refuses all requests.
    """
    functions = [each for each in context.functions if len(each.body) >= _SHORTEST]
    each_asked = min(_MOST, context.most, math.ceil(wanted / max(1, len(functions))))
    order = in_turns(functions, lambda each: each.source.path)
    asked = [(function, sample) for function in islice(order, wanted) for sample in range(each_asked)][:wanted]
    client, answers, done = EndpointClient(f"strategy {NAME}", model.endpoint), Answers(store), 0

    async def one(function: Function, sample: int) -> Candidate | None:
        nonlocal done
        question = _question(model.name, function, context.seed * _MOST + sample)
        try:
            answer = await answers.ask(
                {"kind": NAME, "request": question},
                client.slots,
                lambda: client.post("/chat/completions", question, judge_answer),
            )
        except RequestRefused:
            answer = Answer(text="", served="")
        done += 1
        report(done, len(asked))
        return candidate_of(function, answer.text)

    try:
        async with asyncio.TaskGroup() as group:
            work = [group.create_task(one(*each)) for each in asked]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        await client.close()
    return [each.result() for each in work if each.result() is not None]  # type: ignore[misc]


def candidate_of(function: Function, reply: str) -> Candidate | None:
    """The function with the body of a reply; None if the reply has no such function, or has the same one."""
    text = next(iter(_BLOCK.findall(reply)), reply)
    written = _written(text, function.qualname.rpartition(".")[2])
    if written is None:
        return None
    source, body = function.source, function.body
    start, end = source.span(body[0])[0], source.span(body[-1])[1]
    lines = textwrap.indent(written, " " * body[0].col_offset).lstrip(" ")
    edit = Edit(source.path, start, end, lines)
    before, after = normalized(changed_text(function, ())), normalized(changed_text(function, [edit]))
    if after is None or after == before:
        return None
    return Candidate(NAME, "rewrite_function", function.key, (edit,))


def _written(text: str, name: str) -> str | None:
    """Body after the docstring of the first function of this name in a text, without its indentation."""
    text = textwrap.dedent(text)
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    node = next((each for each in ast.walk(module) if isinstance(each, FunctionNode) and each.name == name), None)
    if node is None:
        return None
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if not body or body[0].lineno == node.lineno:
        return None
    lines = text.split("\n")[body[0].lineno - 1 : body[-1].end_lineno]
    return textwrap.dedent("\n".join(lines))


def _question(model: str, function: Function, seed: int) -> dict[str, Any]:
    """Body of POST /chat/completions."""
    source, body = function.source, function.body
    start, end = source.span(body[0])[0], source.span(body[-1])[1]
    before, after = source.data[:start].decode(), source.data[end:].decode()
    text = f"{before[-_AROUND:]}...{after[:_AROUND]}"
    asked = _ASKED.format(path=source.path, name=function.qualname, text=text)
    return {
        "model": model,
        "messages": [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": asked}],
        "temperature": 1.0,
        "seed": seed,
        "max_tokens": _MAX_TOKENS,
    }
