"""The environment's side of an episode: what a turn of the policy asks for, what is answered, and when it is over.

Rollouts and hosted episodes of the bridge follow these rules; they differ in how they sample and what they keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from contracts.chat import ChatTokenizer, ParsedTurn, parse_turn
from contracts.episodes import Outcome, ToolCallRecord
from contracts.final_states import AnswerState
from contracts.tasks import Task
from inference.grammar.tools import tools_grammar
from inference.rollouts.config import RolloutConfig
from inference.rollouts.prompt import first_messages
from inference.rollouts.turn import answer_of, answer_turn
from inference.rollouts.workspace import Workspace

MIN_TOOL_S = 0.05


@dataclass
class EpisodeEnvironment:
    """Environment of one episode, with what it has seen of the policy so far."""

    task: Task
    config: RolloutConfig
    tokenizer: ChatTokenizer
    turns: int = 0
    """Turns that the policy has taken."""
    format_errors: int = 0
    """Turns that could not be parsed."""
    calls: list[ToolCallRecord] = field(default_factory=list)
    said: str = ""
    """Text of the turn that ended the episode."""
    format_error: str = ""
    """Why the last turn could not be parsed."""

    def prompt(self) -> list[int]:
        """Token ids before the policy's first turn."""
        return self.tokenizer.prompt(first_messages(self.config, self.task))

    @property
    def stops(self) -> tuple[int, int]:
        """Tokens that end a turn."""
        return self.tokenizer.end_of_turn, self.tokenizer.pad

    @property
    def grammar(self) -> str | None:
        """Grammar of the policy's turns, if the experiment asks for it."""
        return tools_grammar(self.tokenizer, self.task.toolset) if self.config.grammar else None

    def read(self, token_ids: Sequence[int]) -> ParsedTurn | Outcome:
        """What a turn asks for, or the outcome of the episode that it ends. token_ids: of the whole turn, the last one
        a stop token.
        """
        text = self.tokenizer.decode(token_ids[:-1])
        turn = parse_turn(text)
        if turn.error is None and not turn.calls:
            self.said = text
            return Outcome.COMPLETED
        self.format_error = turn.error or ""
        if turn.error is not None:
            self.format_errors += 1
            if self.format_errors > self.config.max_format_errors:
                return Outcome.FORMAT_ERROR
        return turn

    def tool_seconds(self, seconds_left: float) -> float:
        """Deadline of one tool call, in seconds, where the episode has `seconds_left`.

        The clock reaches tools as their own deadline: a call cut off from here would take its sandbox along.
        """
        return max(min(self.config.tool_timeout_s, seconds_left), MIN_TOOL_S)

    async def answer(
        self, turn: ParsedTurn, workspace: Workspace, *, timeout_s: float, key: str | None = None
    ) -> list[str]:
        """Execute the calls of a turn. Returns the replies in call order. timeout_s: of one call. key: of idempotency.

        Raises InfraFault.
        """
        answers, calls = await answer_turn(turn, workspace, index=self.turns - 1, timeout_s=timeout_s, key=key)
        self.calls += calls
        return answers

    def observe(self, answers: Sequence[str], tokens: int) -> list[int] | None:
        """Tokens that the policy reads next, in a context of `tokens` tokens. None: the episode is out of turns or
        tokens.

        Replies that leave no room for another token are left out: the policy never reads them.
        """
        ids = self.tokenizer.environment_turn(answers)
        if self.turns >= self.config.max_turns or tokens + len(ids) >= self.config.max_tokens:
            return None
        return ids

    async def final_state(self, workspace: Workspace, key: str | None = None) -> bytes:
        """Bytes of the final state; the sandbox is gone afterwards. key: of idempotency. Raises SandboxBroken."""
        if isinstance(self.task.final_state, AnswerState):
            return answer_of(self.calls, self.said)
        return await workspace.finish(key)
