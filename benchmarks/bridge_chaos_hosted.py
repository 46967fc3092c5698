"""Hosted episodes of the `bridge-chaos` benchmark: their task, and a policy whose turns are a function of the context.

    turns 1 to CALLS    a command that appends a line to the file `marks` and prints it; the line is a digest of all
                        tokens before the turn
    last turn           ends the episode

A command that runs twice leaves its line twice, in the final state and in all that the policy reads afterwards.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pyarrow as pa

from contracts.chat import ChatTokenizer, ToolCallText
from contracts.tasks import Split, Task
from curation.tokenizer import train_tokenizer
from curation.verify import Verifier
from envd.client import Limits, SandboxClient
from inference.bridge.client import Record
from inference.bridge.hosted.hosting import Grade, Hosting
from inference.rollouts.config import RolloutConfig
from inference.rollouts.workspace import Workspaces

CALLS = 3
TASK = Task(
    task_id="marks",
    family="constant",
    split=Split.TRAIN,
    instruction="Make f of m return 2.",
    files={"m.py": b"def f(): return 1\n"},
    hidden_files={"test_m.py": b"from m import f\n\n\ndef test_f():\n    assert f() == 2\n"},
    tests=("test_m.py::test_f",),
    reference_diff=b"",
    meta={},
)
_CONFIG = RolloutConfig(max_turns=2 * CALLS, max_tokens=100_000, max_turn_tokens=1000, episode_timeout_s=600.0)
_MARK = "mark "


class Script:
    """The policy's turns."""

    def __init__(self) -> None:
        self.tokenizer = ChatTokenizer(train_tokenizer((), (), 300))
        prompt = np.array(self.tokenizer.prompt([("user", "")]))
        self._start = prompt[0]
        self._head = len(prompt) - self._last_start(prompt)
        """Tokens before the policy's in its turn."""

    def rest(self, context: Sequence[int]) -> list[int]:
        """Tokens of the policy's turn that `context` ends with a part of, after that part."""
        ids = np.asarray(context, "<i4")
        begin = self._last_start(ids) + self._head
        return self._turn(ids[:begin])[len(ids) - begin :]

    def _turn(self, before: np.ndarray[tuple[int], np.dtype[np.int32]]) -> list[int]:
        if np.count_nonzero(before == self.tokenizer.call_end) == CALLS:
            return [*self.tokenizer.encode_text("done"), self.tokenizer.end_of_turn]
        digest = hashlib.sha256(before.tobytes()).hexdigest()[:12]
        fix = f"echo 'def f(): return {1 + int(digest, 16) % 2}' > m.py"
        command = f"echo '{_MARK}{digest}' >> marks; {fix}; cat marks"
        return self.tokenizer.policy_turn([ToolCallText("exec", {"command": command})])

    def _last_start(self, ids: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
        return int(np.flatnonzero(ids == self._start)[-1])


class _Grader:
    """Grades by the hidden tests alone."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier

    async def grade(self, task: Task, episode: pa.Table) -> Grade:
        """See inference.bridge.hosted.hosting.Grader."""
        verdict = await self._verifier.grade(task, episode["final_diff"][0].as_py())
        return Grade(float(verdict.solved), {}, verdict.exit)


@contextlib.asynccontextmanager
async def hosting(envd: str, tokenizer: ChatTokenizer) -> AsyncIterator[Hosting]:
    """Hosting of TASK in sandboxes of an envd server."""
    async with SandboxClient(envd) as client:
        workspaces = Workspaces(client, Limits(), _CONFIG.episode_timeout_s)
        yield Hosting({TASK.task_id: TASK}, tokenizer, _CONFIG, workspaces, _Grader(Verifier(client, None)))


def executions(record: Record) -> Counter[str]:
    """How often each command of a hosted episode was executed, by its mark."""
    row = pa.ipc.open_stream(pa.BufferReader(record.data)).read_all()
    lines = row["final_diff"][0].as_py().decode().splitlines()
    return Counter(line.removeprefix(f"+{_MARK}") for line in lines if line.startswith(f"+{_MARK}"))
