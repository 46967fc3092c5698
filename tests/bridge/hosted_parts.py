"""Parts of the tests of hosted episodes: a policy that plays a script token by token, and a bridge of it. Also run as a
program, to be killed: `python hosted_parts.py FOLDER ENVD SCRIPT`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from contracts.chat import ChatTokenizer
from contracts.episodes import Slot, episodes_table, sequences_table
from contracts.errors import InfraFault
from contracts.rpc.listening import Listening
from contracts.tasks import Task
from curation.rewards.config import RewardConfig
from curation.rewards.grading import grade_episodes
from curation.verify import Verifier
from envd.client import Limits as SandboxLimits
from envd.client import SandboxClient
from envd.fleet import open_client
from envd.operations.client import OperationsClient
from inference.bridge.checks import Limits
from inference.bridge.client import Episode, Record
from inference.bridge.hosted.hosting import Grade, Grader, Hosting
from inference.bridge.record import METADATA
from inference.bridge.serve import Bridge, Options, serving
from inference.engines.base import Engine, Piece, SamplingParams
from inference.rollouts.config import RolloutConfig
from inference.rollouts.episode import Player, play_episode
from inference.rollouts.workspace import Workspaces
from ops.bridge_hosting import EpisodeGrader
from tests.bridge.bridge_harness import ROOT
from tests.rollouts.rollouts_script import Script, ScriptedEngine, byte_tokenizer, call, make_tasks

LIMITS = Limits(0, 4096)
TASKS = make_tasks(3)
ROW = (
    *("task_id", "task_digest", "image_digest", "seed", "temperature", "policy_version", "outcome", "failure", "turns"),
    *("tool_calls", "format_errors", "policy_tokens", "final_state", "final_diff"),
)
"""Columns of EPISODES that are equal however an episode is played."""


class StreamedScript(ScriptedEngine):
    """A script whose turns come token by token, and go on after the tokens that a prompt has of them already."""

    def __init__(self, tokenizer: ChatTokenizer, script: Script, pause_s: float = 0.0) -> None:
        """pause_s: before each token."""
        super().__init__(tokenizer, script)
        self._pause_s = pause_s
        prompt = tokenizer.prompt([("user", "x")])
        self._mark = prompt[0]
        self._head = len(prompt) - self._last_mark(prompt)

    def _last_mark(self, ids: Sequence[int]) -> int:
        return max(place for place, token in enumerate(ids) if token == self._mark)

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
        ids = np.asarray(prompt_ids).tolist()
        begin = self._last_mark(ids) + self._head
        had = len(ids) - begin
        whole = SamplingParams(params.temperature, params.max_tokens + had, params.seed, params.stop_token_ids)
        made = await self.generate(ids[:begin], whole)
        for place in range(had, len(made.token_ids)):
            await asyncio.sleep(self._pause_s)
            one = slice(place, place + 1)
            last = place == len(made.token_ids) - 1
            yield Piece(
                np.array(made.token_ids[one], np.int32),
                np.array(made.logprobs[one], np.float32),
                [(self._version, 0, 1)],
                made.finish_reason if last else None,
            )


def marks(turn: int, seed: int) -> Any:
    """Leaves a mark for every call that is executed, fixes the task for odd seeds, and stops."""
    if turn < 3:
        return [call("exec", command=f"sleep 0.2; echo {turn} >> marks"), call("read", path="m.py")]
    new = "def f(): return 2" if seed % 2 else "def f(): return 3"
    return [[call("edit", path="m.py", line=1, new=new)], "done"][turn - 3]


def reads(turn: int, seed: int) -> Any:
    """Calls a tool for ever."""
    return [call("read", path="m.py")]


def hangs(turn: int, seed: int) -> Any:
    """Calls a tool that takes long, once."""
    return [[call("exec", command="echo begun >> marks; sleep 3; echo ended >> marks")], "done"][turn]


def big(turn: int, seed: int) -> Any:
    """Leaves a mark and a final state of more than envd keeps as an answer."""
    make = "import random; open('big', 'w').write(random.Random(1).randbytes(1500000).hex())"
    return [[call("exec", command=f'echo 0 >> marks; python3 -c "{make}"')], "done"][turn]


SCRIPTS: dict[str, Script] = {"marks": marks, "reads": reads, "hangs": hangs, "big": big}


def settings(**changes: Any) -> RolloutConfig:
    values = {"max_turns": 8, "max_tokens": 2400, "max_turn_tokens": 300, "episode_timeout_s": 300.0}
    return RolloutConfig.model_validate({**values, **changes})


class FailingGrader:
    """A grader whose verifier is away for the first `failures` episodes that it is asked for."""

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self.asked = 0
        self.inner: Grader | None = None

    async def grade(self, task: Task, episode: pa.Table) -> Grade:
        self.asked += 1
        if self.asked <= self._failures:
            raise InfraFault("the verifier is away")
        assert self.inner is not None
        return await self.inner.grade(task, episode)


def hosting_of(
    client: SandboxClient,
    config: RolloutConfig,
    tokenizer: ChatTokenizer,
    tasks: dict[str, Task],
    failing: FailingGrader | None,
) -> Hosting:
    """Hosting as an experiment's, with a real verifier that has no store."""
    workspaces = Workspaces(client, SandboxLimits(), config.episode_timeout_s)
    grader: Grader = EpisodeGrader(Verifier(client, None), RewardConfig())
    if failing is not None:
        failing.inner, grader = grader, failing
    return Hosting(tasks, tokenizer, config, workspaces, grader)


@contextlib.asynccontextmanager
async def hosted_bridge(
    engine: Engine,
    envd: str,
    folder: Path,
    *,
    tokenizer: ChatTokenizer | None = None,
    keys: Sequence[str] = (),
    tasks: dict[str, Task] = TASKS,
    limits: Limits = LIMITS,
    config: RolloutConfig = settings(),
    grader: FailingGrader | None = None,
    **options: Any,
) -> AsyncIterator[Bridge]:
    """A bridge that hosts `tasks` on a Unix socket in `folder`."""
    (folder / "keys").write_text("\n".join(keys))

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Hosting]:
        async with open_client(envd) as client:
            yield hosting_of(client, config, tokenizer or byte_tokenizer(), tasks, grader)

    listening = Listening(f"unix:{folder / 'b.sock'}", key_file=folder / "keys" if keys else None)
    async with serving(engine, limits, Options(listening, hosting=opened, **options)) as bridge:
        yield bridge


@contextlib.contextmanager
def killable(folder: Path, envd: str, script: str = "marks", kill_at: str = "") -> Iterator[subprocess.Popen[str]]:
    """The bridge in a process of its own, with its journal in `folder`. kill_at: see contracts.failpoints."""
    command = [sys.executable, __file__, str(folder), envd, script]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "TRIPLANE_KILL_AT": kill_at}
    running = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert running.stdout is not None and "ready" in running.stdout.readline()
        yield running
    finally:
        if running.poll() is None:
            running.send_signal(signal.SIGKILL)
        running.communicate()


async def played(episode: Episode) -> Record:
    """The record of an episode that is stepped until it is over."""
    while not episode.done:
        await episode.step()
    return await episode.end()


def rows_of(record: Record) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Row of EPISODES, row of SEQUENCES, and what the metadata says."""
    source = pa.BufferReader(record.data)
    episodes, sequences = pa.ipc.open_stream(source).read_all(), pa.ipc.open_stream(source).read_all()
    about = json.loads(episodes.schema.metadata[METADATA])
    return episodes.to_pylist()[0], sequences.to_pylist()[0], about


def check_equal(record: Record, rollout: tuple[dict[str, Any], dict[str, Any], float | None]) -> None:
    """Require that a hosted episode is this rollout: rows of EPISODES and SEQUENCES, and the reward."""
    (row, sequence, about), (expected, expected_sequence, reward) = rows_of(record), rollout
    for name in ROW:
        assert row[name] == expected[name], name
    assert set(sequence) == set(expected_sequence)
    for name in set(sequence) - {"episode_id"}:
        assert sequence[name] == expected_sequence[name], name
    assert about["reward"] == reward


async def rolled_out(
    engine: Engine, envd: str, task: Task, seed: int, config: RolloutConfig, tokenizer: ChatTokenizer
) -> tuple[dict[str, Any], dict[str, Any], float | None]:
    """The same as a rollout whose slot has this token seed: rows of EPISODES and SEQUENCES, and the reward."""

    class Seeded(Slot):
        @property
        def token_seed(self) -> int:
            return seed

    async with open_client(envd) as client:
        player = Player.of(engine, client, tokenizer, config, policy_version=await engine.version(), key="k")
        episode = await play_episode(player, task, Seeded("e", "0000", "g", task.task_id, 0, 1), "g")
        table = episodes_table([episode])
        rewards = await grade_episodes(
            table, {task.task_id: task}, Verifier(client, None), RewardConfig(), lambda done, total: None
        )
    (sequence,) = sequences_table([episode], *config.recorded).to_pylist()
    return table.to_pylist()[0], sequence, rewards["reward"].to_pylist()[0]


async def live_sandboxes(envd: str) -> int:
    """Sandboxes that exist at an envd server."""
    async with OperationsClient(envd) as client:
        return (await client.info()).live


async def nothing_left(envd: str) -> None:
    """Wait until no sandbox lives, which takes as long as ending some."""
    deadline = asyncio.get_running_loop().time() + 60
    while await live_sandboxes(envd):
        assert asyncio.get_running_loop().time() < deadline, "a sandbox was left over"
        await asyncio.sleep(0.1)


async def _main(folder: Path, envd: str, script: str) -> None:
    engine = StreamedScript(byte_tokenizer(), SCRIPTS[script])
    async with hosted_bridge(engine, envd, folder, journal=folder / "journal"):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
