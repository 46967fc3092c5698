"""The tasks that a bridge hosts, by which settings, and who grades."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Protocol

import pyarrow as pa

from contracts.chat import ChatTokenizer
from contracts.pb import bridge_pb2 as pb
from contracts.tasks import Task
from inference.bridge.checks import Limits
from inference.bridge.episode import bytes_of
from inference.bridge.errors import BadMessage, UnknownTask
from inference.rollouts.config import RolloutConfig
from inference.rollouts.environment import EpisodeEnvironment
from inference.rollouts.workspace import Workspaces

TASK_LABELS = ("task_id", "task_digest", "image_digest")
"""Labels that the bridge sets itself: columns of the record."""


@dataclass(frozen=True)
class Grade:
    """What a final state is worth."""

    reward: float | None
    """None: the episode is not scored."""
    components: Mapping[str, float]
    """Weighted contributions to the reward, by name."""
    verdict: str
    """As in REWARDS (curation/rewards/tables.py)."""


class Grader(Protocol):
    """Grades episodes that are over."""

    async def grade(self, task: Task, episode: pa.Table) -> Grade:
        """Grade of an episode of `task`. episode: its row of EPISODES. Raises InfraFault if it can't be told now."""


@dataclass(frozen=True)
class Hosting:
    """What hosted episodes are played with."""

    tasks: Mapping[str, Task]
    """By id."""
    tokenizer: ChatTokenizer
    """Of every policy that is served."""
    config: RolloutConfig
    """Prompt, limits and deadlines, as those of rollouts."""
    workspaces: Workspaces
    grader: Grader | None = None
    """None: episodes get no reward."""

    def start(self, message: pb.StartEpisodeRequest, limits: Limits) -> pb.StartEpisodeRequest:
        """The start of a hosted episode as that of an episode with a prompt: what it leaves out is filled in.

        Raises BadMessage, UnknownTask, RequestTooLong.
        """
        if message.prompt_ids:
            raise BadMessage("prompt_ids of a hosted episode must be empty: its task makes the prompt")
        if message.top_p or message.grammar:
            raise BadMessage(
                "top_p and grammar of a hosted episode are those of the bridge's experiment: leave them out"
            )
        own = sorted(set(message.labels) & set(TASK_LABELS))
        if own:
            raise BadMessage(f"labels[{own[0]!r}] of a hosted episode is its task's: leave it out")
        task = self.task(message.hosted.task_id, message.hosted.task_digest)
        environment = EpisodeEnvironment(task, self.config, self.tokenizer)
        ids = environment.prompt()
        limits.within(self.config.max_tokens).check_room(len(ids), f"the prompt of task {task.task_id}")
        filled = pb.StartEpisodeRequest()
        filled.CopyFrom(message)
        filled.prompt_ids = bytes_of(ids)
        filled.top_p, filled.grammar = self.config.top_p, environment.grammar or ""
        filled.sampling.CopyFrom(self.sampling(message.sampling))
        filled.hosted.task_digest = task.digest
        for name, value in zip(TASK_LABELS, (task.task_id, task.digest, task.files_digest), strict=True):
            filled.labels[name] = value
        return filled

    def sampling(self, message: pb.Sampling) -> pb.Sampling:
        """Sampling parameters with what they leave out filled in. Raises BadMessage."""
        most = self.config.max_turn_tokens
        if message.stop_token_ids:
            raise BadMessage("sampling.stop_token_ids of a hosted episode must be empty: the chat markup ends turns")
        if message.max_tokens > most:
            raise BadMessage(
                f"sampling.max_tokens={message.max_tokens}: a hosted turn has at most {most} tokens"
                " (rollouts.max_turn_tokens of the bridge's experiment)"
            )
        filled = pb.Sampling()
        filled.CopyFrom(message)
        if not message.HasField("temperature"):
            filled.temperature = self.config.temperature
        filled.max_tokens = message.max_tokens or most
        filled.stop_token_ids.extend((self.tokenizer.end_of_turn, self.tokenizer.pad))
        return filled

    def task(self, task_id: str, digest: str = "") -> Task:
        """A task. digest: refused unless it is the task's; empty: any. Raises UnknownTask."""
        task = self.tasks.get(task_id)
        if task is None:
            near = get_close_matches(task_id[:200], self.tasks, 1)
            words = f"did you mean {near[0]!r}?" if near else "`triplane tasks list` names those of an experiment"
            raise UnknownTask(f"task {task_id[:200]!r} is not one of the {len(self.tasks)} of this bridge: {words}")
        if digest and digest != task.digest:
            raise UnknownTask(
                f"task {task_id} has digest {task.digest} at this bridge, not {digest[:64]}: serve the task suite that"
                " has it"
            )
        return task
