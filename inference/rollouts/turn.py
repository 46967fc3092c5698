"""Turn a policy's output into the environment's reply."""

from __future__ import annotations

import json
from collections.abc import Sequence

from contracts.chat import ParsedTurn, ToolCallText, parse_turn
from contracts.digests import canonical_json
from contracts.episodes import ToolCallRecord
from contracts.errors import SchemaError
from contracts.final_states import final_answer
from envd.client import ToolCall
from envd.tools import SUBMIT_ANSWER
from inference.rollouts.workspace import Workspace


def read_turn(text: str) -> ParsedTurn:
    """`parse_turn`, refusing also what JSON readers let through but nothing can write down again: NaN, infinity, lone
    surrogates.
    """
    try:
        turn = parse_turn(text)
        for call in turn.calls:
            arguments_text(call)
    except (ValueError, SchemaError, RecursionError):
        return ParsedTurn((), "tool call is not JSON")
    return turn


def arguments_text(call: ToolCallText) -> str:
    """A call's arguments as canonical JSON. Raises SchemaError or UnicodeEncodeError when they have none."""
    canonical_json(call.name)
    return canonical_json(call.arguments).decode()


def answer_of(records: Sequence[ToolCallRecord], said: str) -> bytes:
    """Final state of an episode that submitted its answer in one of these calls, or said it in its last turn."""
    submitted = [json.loads(each.arguments)["answer"] for each in records if each.ok and each.name == SUBMIT_ANSWER]
    return final_answer(submitted, said)


def unparsed_reply(turn: ParsedTurn) -> str:
    """What the policy reads after a turn that can't be parsed."""
    return f"error: {turn.error}"


async def answer_turn(
    turn: ParsedTurn, workspace: Workspace, *, index: int, timeout_s: float, key: str | None = None
) -> tuple[list[str], list[ToolCallRecord]]:
    """Execute a turn's calls, concurrently where the sandbox allows it. Returns replies in call order, with a record of
    each.

    A turn that can't be parsed is answered by its error and records no call. index: of the turn, from 0. key: of
    idempotency. Raises InfraFault.
    """
    if turn.error is not None:
        return [unparsed_reply(turn)], []
    results = await workspace.run([ToolCall(call.name, call.arguments) for call in turn.calls], timeout_s, key)
    records = [
        ToolCallRecord(index, call.name, arguments_text(call), result.ok, result.text)
        for call, result in zip(turn.calls, results, strict=True)
    ]
    return [record.result for record in records], records
