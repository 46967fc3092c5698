"""Turn a policy's output into the environment's reply."""

from __future__ import annotations

import json
from collections.abc import Sequence

from contracts.chat import ParsedTurn
from contracts.digests import canonical_json
from contracts.episodes import ToolCallRecord
from contracts.final_states import final_answer
from envd.client import ToolCall
from envd.tools import SUBMIT_ANSWER
from inference.rollouts.workspace import Workspace


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
        ToolCallRecord(index, call.name, canonical_json(call.arguments).decode(), result.ok, result.text)
        for call, result in zip(turn.calls, results, strict=True)
    ]
    return [record.result for record in records], records
