"""Parts of the rollout tests: a byte-level tokenizer, one-file tasks, and an engine that plays given turns through the
tokenizer.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from contracts.artifacts import ArtifactRef
from contracts.chat import SPECIAL_TOKENS, ChatTokenizer, ToolCallText
from contracts.episodes import Episode
from contracts.tasks import Split, Task
from inference.engines.base import Completion, SamplingParams
from inference.errors import RequestTooLong
from inference.rollouts.config import RolloutConfig
from inference.rollouts.episode import Player
from inference.rollouts.evaluate import evaluation_groups
from inference.rollouts.plan import RolloutPlan, draw_prompts
from inference.rollouts.runner import Uncommitted, play_groups

POLICY = ArtifactRef(kind="checkpoint", key="c" * 64, digest="d" * 64)
FIX = b"+def f(): return 2\n"
Script = Callable[[int, int], Sequence[ToolCallText] | str]
"""(turn from 0, seed) -> calls, or raw text."""


def byte_tokenizer() -> ChatTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return ChatTokenizer(tokenizer)


def one_file_task(index: int) -> Task:
    return Task(
        task_id=f"task-{index:03d}",
        family="constant",
        split=Split.TRAIN,
        instruction=f"Make f of m{index} return 2.",
        files={"m.py": f"def f(): return 1\n# {index}\n".encode()},
        hidden_files={"test_m.py": b"from m import f\n\n\ndef test_f():\n    assert f() == 2\n"},
        tests=("test_m.py::test_f",),
        reference_diff=b"",
        meta={},
    )


def make_tasks(count: int) -> dict[str, Task]:
    return {task.task_id: task for task in map(one_file_task, range(count))}


def make_plan(tasks: Mapping[str, Task], count: int, reserve: int = 0, workers: int = 1, **config: Any) -> RolloutPlan:
    groups, spare, _ = draw_prompts(sorted(tasks), count=count, reserve=reserve, cursor=0, seed=5, iteration="0001")
    settings = {"group_size": 4, "max_tokens": 1200, "max_turn_tokens": 200, "concurrency": 16, **config}
    return RolloutPlan(
        experiment="test",
        iteration="0001",
        seed=5,
        key="a" * 64,
        policy=POLICY,
        groups=groups,
        reserve=spare,
        workers=workers,
        config=RolloutConfig.model_validate(settings),
    )


def call(name: str, **arguments: Any) -> ToolCallText:
    return ToolCallText(name, arguments)


def read_then_maybe_fix(turn: int, seed: int) -> Sequence[ToolCallText] | str:
    """Reads, then edits the right way for half of the seeds, then stops."""
    new = "def f(): return 2" if seed % 2 else "def f(): return 3"
    return [[call("read", path="m.py")], [call("edit", path="m.py", line=1, new=new)], "done"][turn]


@dataclass(frozen=True)
class ByDiff:
    """A verdict that needs no tests."""

    solved: bool


class GraderByDiff:
    async def grade(self, task: Task, diff: bytes) -> ByDiff:
        return ByDiff(FIX in diff)


async def play_evaluation(player: Player, tasks: Iterable[Task], samples: int, seed: int = 1) -> list[Episode]:
    """Episodes in order of task and sample, committed nowhere."""
    groups = evaluation_groups(tasks, samples, experiment="test", split=Split.GATE, seed=seed, key=player.key)
    return [episode for group in await play_groups(player, groups, Uncommitted()) for episode in group]


class ScriptedEngine:
    """Plays a script. Turns are cut to `max_tokens` like a real engine's; latency is random and changes nothing."""

    def __init__(self, tokenizer: ChatTokenizer, script: Script, *, delay_s: float = 0.0, context: int = 4096) -> None:
        self._tokenizer, self._script, self._delay_s, self._context = tokenizer, script, delay_s, context
        self._version = POLICY.digest
        self.requests = 0

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        self.requests += 1
        if len(prompt_ids) >= self._context:
            raise RequestTooLong(f"prompt of {len(prompt_ids)} tokens: shorten it")
        await asyncio.sleep(random.random() * self._delay_s)
        said = self._script(self._tokenizer.decode(prompt_ids).count("<|im_start|>assistant\n") - 1, params.seed)
        calls, text = ([], said) if isinstance(said, str) else (said, "")
        ids = self._raw(text) if isinstance(said, str) else self._tokenizer.policy_turn(calls)
        ids = ids[: params.max_tokens]
        stopped = ids[-1] in params.stop_token_ids
        logprobs = [-0.125 * (1 + token % 7) for token in ids]
        return Completion(ids, logprobs, [(self._version, 0, len(ids))], "stop" if stopped else "length")

    def _raw(self, text: str) -> list[int]:
        """Tokens of text with its markup as markup: what a policy could sample."""
        ids = list(self._tokenizer._text.encode(text).ids)
        for token in SPECIAL_TOKENS:
            plain, special = self._tokenizer.encode_text(token), self._tokenizer._text.token_to_id(token)
            place = 0
            while place <= len(ids) - len(plain):
                if ids[place : place + len(plain)] == plain:
                    ids[place : place + len(plain)] = [special]
                place += 1
        return [*ids, self._tokenizer.end_of_turn]

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        return [0.0 if index == 0 else -0.125 * (1 + token % 7) for index, token in enumerate(token_ids)]

    async def load_weights(self, directory: Path, version: str) -> None:
        self._version = version

    async def version(self) -> str:
        return self._version

    async def close(self) -> None:
        return None
