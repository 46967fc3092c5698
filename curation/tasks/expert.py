"""Scripted expert: follow the calls to the wrong line, replace it, say done. Replies come from the real tools.

After reading a file, the expert notes the requested operation and the file's operation. So the choice between editing
and reading on is a comparison of adjacent words: a small policy learns it in a third of the steps, and with every seed.
"""

from __future__ import annotations

from dataclasses import dataclass

from contracts.chat import ChatTokenizer, ToolCallText
from contracts.episodes import TokenRole
from curation.errors import TaskError
from curation.tasks.bugs import VISIBLE_TEST, Bug
from curation.tasks.operations import Operation
from curation.tasks.suite import visible_test
from envd.client import ToolCall
from envd.tools import Store, tool_steps

DONE = "done"
"""The expert's last turn: a turn without a tool call ends the episode."""


@dataclass(frozen=True)
class ExpertTurn:
    """One turn: a note, tool calls and their results."""

    note: str
    calls: tuple[ToolCallText, ...]
    responses: tuple[str, ...]


@dataclass(frozen=True)
class ExpertEpisode:
    """An instruction, turns with tool calls, and an implied last turn that says DONE."""

    instruction: str
    turns: tuple[ExpertTurn, ...]


def expert_episode(bug: Bug, answer: Operation, *, parallel: bool = False) -> ExpertEpisode:
    """Solve `bug` with `answer`, which may be wrong: read inwards from the named function, edit the wrong line.

    parallel: read the first module and the visible test in one turn.
    """
    files = {path: text.encode() for path, text in bug.modules(bug.wrong).items()}
    followed = range(len(bug.chain) - 1, bug.index - 1, -1)
    reads = [[bug.paths[index]] for index in followed]
    if parallel:
        files[VISIBLE_TEST] = visible_test(bug).encode()
        reads[0].append(VISIBLE_TEST)
    edit = {"path": bug.path, "line": bug.line, "new": bug.answer(bug.index, answer)}
    acts = [[ToolCallText("read", {"path": path}) for path in paths] for paths in reads]
    acts.append([ToolCallText("edit", edit)])
    notes = ["", *(note(bug, index) for index in followed)]
    turns = [
        ExpertTurn(said, tuple(calls), tuple(_response(files, call) for call in calls))
        for said, calls in zip(notes, acts, strict=True)
    ]
    return ExpertEpisode(bug.instruction, tuple(turns))


def _response(files: dict[str, bytes], call: ToolCallText) -> str:
    """Run a sandbox's tool on files in memory."""
    steps = tool_steps(ToolCall(call.name, call.arguments))
    answer: bytes | None = None
    while True:
        try:
            need = steps.send(answer)
        except StopIteration as end:
            if not end.value.ok:
                raise TaskError(
                    f"the scripted expert's call {call.name} {dict(call.arguments)} failed: {end.value.text}"
                ) from None
            return str(end.value.text)
        if isinstance(need, Store):
            files[need.path] = need.data
        answer = files[need.path]


def note(bug: Bug, index: int) -> str:
    """Note of the expert after reading a function: the requested and the actual operation."""
    has = bug.wrong if index == bug.index else bug.chain[index]
    return f"want {bug.chain[index].word} have {has.symbol} here"


def expert_tokens(episode: ExpertEpisode, tokenizer: ChatTokenizer) -> tuple[list[int], list[int]]:
    """Token ids and roles of the whole episode, as the agent loop records them."""
    ids = tokenizer.prompt([("user", episode.instruction)])
    roles = [int(TokenRole.PROMPT)] * len(ids)
    for turn in episode.turns:
        _append(ids, roles, tokenizer.policy_turn(turn.calls, turn.note), TokenRole.POLICY)
        _append(ids, roles, tokenizer.environment_turn(turn.responses), TokenRole.ENVIRONMENT)
    _append(ids, roles, tokenizer.policy_turn([], DONE), TokenRole.POLICY)
    return ids, roles


def _append(ids: list[int], roles: list[int], more: list[int], role: TokenRole) -> None:
    ids += more
    roles += [int(role)] * len(more)
