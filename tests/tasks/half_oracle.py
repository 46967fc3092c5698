"""An engine that plays the oracle in half of its samples, by the parity of their seeds, and does nothing in the others.

Its tokens have the log-probabilities of the checkpoint that it serves, so that a trainer accepts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contracts.chat import ChatTokenizer, ToolCallText
from contracts.store import open_store
from contracts.tasks import Task
from curation.tasks.agents import Observation, Oracle
from curation.tasks.importing.find import find_suite
from curation.tasks.inspect import suite_tasks
from inference.engines.base import Completion, SamplingParams
from inference.engines.builtin import BuiltinEngine

_ASKED, _ANSWER, _END = "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>"


def plays_oracle(seed: int) -> bool:
    return seed % 2 == 0


def open_engine(options: dict[str, Any], directory: Path, version: str) -> HalfOracle:
    tasks = suite_tasks(find_suite(open_store(options["store"]), options["suite"]))
    return HalfOracle(directory, version, {task.instruction: task for task in tasks.values()})


class HalfOracle(BuiltinEngine):
    def __init__(self, directory: Path, version: str, tasks: dict[str, Task]) -> None:
        super().__init__(directory, version, threads=1)
        self._chat, self._by_instruction = ChatTokenizer.from_directory(directory), tasks

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        text = self._chat.decode(prompt_ids)
        task = self._by_instruction[text.split(_ASKED, 1)[1].split(_END, 1)[0]]
        acts = plays_oracle(params.seed) and text.count(_ANSWER) == 1
        calls = Oracle().act(task, Observation(task.task_id, task.instruction, ())) if acts else ()
        ids = self._chat.policy_turn([ToolCallText(call.name, dict(call.arguments)) for call in calls], "done")
        assert len(ids) <= params.max_tokens, f"{len(ids)} tokens of {task.task_id} exceed {params.max_tokens}"
        logprobs = (await self.score([*prompt_ids, *ids]))[len(prompt_ids) :]
        return Completion(ids, logprobs, [(await self.version(), 0, len(ids))], "stop")
