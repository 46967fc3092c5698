"""Replay a recorded episode's tool calls in a fresh sandbox; the environment must reply as recorded."""

from __future__ import annotations

from dataclasses import dataclass, field

from contracts.chat import ChatTokenizer, parse_turn
from contracts.episodes import Episode, TokenSequence, ToolCallRecord
from contracts.final_states import AnswerState, RequestsState
from contracts.store import Store
from contracts.tasks import Task
from envd.client import Limits, SandboxClient
from inference.errors import RolloutError
from inference.rollouts.config import RolloutConfig
from inference.rollouts.transcript import policy_turns
from inference.rollouts.turn import answer_of, answer_turn
from inference.rollouts.workspace import Workspace, Workspaces


@dataclass(frozen=True)
class Replay:
    """Comparison of a replay with its record."""

    environment_tokens: int
    """Recorded tokens of the environment that came out the same."""
    differing_turn: int | None
    """First turn whose answer differs in any token, from 0; None when all agree."""
    same_diff: bool
    """Whether the final state has the same bytes."""

    @property
    def exact(self) -> bool:
        """Whether everything agrees."""
        return self.differing_turn is None and self.same_diff


async def replay_episode(
    episode: Episode,
    task: Task,
    *,
    sandboxes: SandboxClient,
    tokenizer: ChatTokenizer,
    config: RolloutConfig,
    limits: Limits = Limits(),
    store: Store | None = None,
) -> Replay:
    """Execute the policy's recorded tokens in a fresh sandbox of `task`.

    Episodes ended by the clock or by a fault can't be replayed. store: has the task's runtime.

    Raises RolloutError when `task` is not the one that was played or is graded by requests, InfraFault when the sandbox
    fails.
    """
    if task.digest != episode.task_digest:
        raise RolloutError(
            f"episode {episode.episode_id} was played on another version of task {task.task_id}: open the task suite of"
            " its iteration"
        )
    if isinstance(task.final_state, RequestsState):
        raise RolloutError(
            f"episode {episode.episode_id} is graded by its requests, and a replay would make them again: it has none"
        )
    (sequence,) = episode.sequences
    workspace = Workspaces(sandboxes, limits, config.episode_timeout_s, store).open(task)
    try:
        turns = await replay_turns(sequence, workspace, tokenizer, config.tool_timeout_s)
        answered = isinstance(task.final_state, AnswerState)
        final = answer_of(turns.records, turns.said) if answered else await workspace.finish()
        return Replay(turns.agreed, turns.differing, final == episode.final_diff)
    finally:
        await workspace.close()


@dataclass
class ReplayedTurns:
    """What came of the turns of a sequence."""

    agreed: int = 0
    """Tokens of the environment that came out as recorded."""
    differing: int | None = None
    """First turn, from 0, whose answer differs in any token."""
    said: str = ""
    """Text of a last turn without calls."""
    records: list[ToolCallRecord] = field(default_factory=list)


async def replay_turns(
    sequence: TokenSequence, workspace: Workspace, tokenizer: ChatTokenizer, tool_timeout_s: float
) -> ReplayedTurns:
    """Execute the calls in the policy's tokens, in order. Raises InfraFault when the sandbox fails."""
    ids, turns, found = sequence.token_ids, policy_turns(sequence), ReplayedTurns()
    ends = [*(start for start, _ in turns), len(ids)][1:]
    for index, ((start, end), answer_end) in enumerate(zip(turns, ends, strict=True)):
        if ids[end - 1] not in (tokenizer.end_of_turn, tokenizer.pad):
            break
        text = tokenizer.decode(ids[start : end - 1])
        turn = parse_turn(text)
        if turn.error is None and not turn.calls:
            found.said = text
            break
        answers, called = await answer_turn(turn, workspace, index=index, timeout_s=tool_timeout_s)
        found.records += called
        recorded = ids[end:answer_end]
        if recorded and recorded != tokenizer.environment_turn(answers):
            found.differing = index if found.differing is None else found.differing
        else:
            found.agreed += len(recorded)
    return found
