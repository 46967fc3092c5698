"""Scripted expert: follow the calls to the wrong line, replace it, say done. Replies come from the real tools.

After reading a file, the expert notes the requested operation and the file's operation. So the choice between editing
and reading on is a comparison of adjacent words: a small policy learns it in a third of the steps, and with every seed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from contracts.chat import ChatTokenizer, ToolCallText
from contracts.episodes import TokenRole
from contracts.owned import owned_directory, sweep_abandoned
from curation.errors import TaskError
from curation.tasks.bugs import VISIBLE_TEST, Bug
from curation.tasks.operations import Operation
from curation.tasks.suite import visible_test
from envd.client import ToolCall
from envd.tools import run_file_tool

_PREFIX = "triplane-expert-"
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


@contextmanager
def open_workbench() -> Iterator[Workbench]:
    """Workbench in a temporary directory, in memory if the system has such a file system."""
    memory = Path("/dev/shm")
    place = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    sweep_abandoned(place, _PREFIX)
    with owned_directory(_PREFIX, place) as root:
        yield Workbench(Path(root))


class Workbench:
    """Directory in which expert episodes run in sequence, with the tools of the sandboxes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        (root / VISIBLE_TEST).parent.mkdir(exist_ok=True)

    def play(self, bug: Bug, answer: Operation, *, parallel: bool = False) -> ExpertEpisode:
        """Solve `bug` with `answer`, which may be wrong: read inwards from the named function, edit the wrong line.

        parallel: read the first module and the visible test in one turn.
        """
        for path, text in bug.modules(bug.wrong).items():
            (self._root / path).write_text(text, encoding="utf-8")
        followed = range(len(bug.chain) - 1, bug.index - 1, -1)
        reads = [[bug.paths[index]] for index in followed]
        if parallel:
            (self._root / VISIBLE_TEST).write_text(visible_test(bug), encoding="utf-8")
            reads[0].append(VISIBLE_TEST)
        edit = {"path": bug.path, "line": bug.line, "new": bug.answer(bug.index, answer)}
        acts = [[ToolCallText("read", {"path": path}) for path in paths] for paths in reads]
        acts.append([ToolCallText("edit", edit)])
        notes = ["", *(note(bug, index) for index in followed)]
        turns = tuple(self._turn(said, calls) for said, calls in zip(notes, acts, strict=True))
        return ExpertEpisode(bug.instruction, turns)

    def _turn(self, said: str, calls: Sequence[ToolCallText]) -> ExpertTurn:
        results = [run_file_tool(self._root, ToolCall(call.name, call.arguments)) for call in calls]
        for call, result in zip(calls, results, strict=True):
            if not result.ok:
                raise TaskError(f"the scripted expert's call {call.name} {dict(call.arguments)} failed: {result.text}")
        return ExpertTurn(said, tuple(calls), tuple(result.text for result in results))


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
