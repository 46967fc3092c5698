"""Agents without a model, to check a suite: the oracle applies the reference fix, noop does nothing, a script is
supplied by the user.

play_suite -> play_task: sandbox -> agent.act -> tool calls -> ... -> final diff -> verdict
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import inspect
import json
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from contracts.digests import sha256
from contracts.final_states import AnswerState, RequestsState, final_answer, recording
from contracts.tasks import Task
from curation.errors import TaskError
from curation.verdicts import Verdict
from curation.verify import Verifier
from envd.client import Export, Limits, SandboxClient, ToolCall, ToolResult
from envd.tools import SUBMIT_ANSWER

MAX_TURNS = 50
TOOL_TIMEOUT_S = 30.0
CONCURRENCY = 8
"""Tasks run concurrently."""
_PATCH = ".triplane-reference.b64"


@dataclass(frozen=True)
class Turn:
    """Calls of one turn and their results, in the same order."""

    calls: tuple[ToolCall, ...]
    results: tuple[ToolResult, ...]


@dataclass(frozen=True)
class Observation:
    """Input of an agent's next turn."""

    task_id: str
    instruction: str
    turns: tuple[Turn, ...]
    """Turns so far."""
    sample: int = 0
    """Number of this attempt at the task, from 0."""


class Agent(Protocol):
    """Protocol: returns the next turn. One agent works on many tasks concurrently, in threads."""

    def act(self, task: Task, observation: Observation) -> Sequence[ToolCall]:
        """Calls of the next turn; an empty list ends the episode."""


class Noop:
    """Does nothing; must score 0."""

    def act(self, task: Task, observation: Observation) -> Sequence[ToolCall]:
        """No calls."""
        return ()


class Oracle:
    """Applies the reference fix with git in the sandbox, or submits the right answer, or makes the requests; must
    score 1.
    """

    def act(self, task: Task, observation: Observation) -> Sequence[ToolCall]:
        """Calls that write and apply the patch, then no calls."""
        if isinstance(task.final_state, AnswerState):
            return () if observation.turns else (ToolCall(SUBMIT_ANSWER, {"answer": task.final_state.expected}),)
        if isinstance(task.final_state, RequestsState):
            return () if observation.turns else (ToolCall("exec", {"command": _requesting(task.final_state)}),)
        if not observation.turns:
            text = base64.encodebytes(task.reference_diff).decode()
            command = f"base64 -d {_PATCH} | git apply --whitespace=nowarn - && rm {_PATCH} && echo applied"
            return ToolCall("write", {"path": _PATCH, "content": text}), ToolCall("exec", {"command": command})
        written, applied = observation.turns[0].results
        if not (written.ok and applied.ok and "applied" in applied.text):
            said = " ".join((applied.text if written.ok else written.text).split())[:300]
            raise TaskError(f"task {task.task_id}: its reference fix does not apply in a sandbox: {said}")
        return ()


class Script:
    """A Python file with `def act(observation)`, which returns a list of {"name": ..., "arguments": {...}}.

    It runs in this process, not in the sandbox.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._act = _load(path)

    def act(self, task: Task, observation: Observation) -> Sequence[ToolCall]:
        """Calls that the script returns. Raises TaskError with script and task."""
        try:
            answer = self._act(observation)
        except Exception as error:
            raise TaskError(
                f"{self._path} failed at task {task.task_id}, turn {len(observation.turns)}: {type(error).__name__}:"
                f" {error}"
            ) from error
        if answer is None:
            return ()
        return tuple(self._call(each) for each in (answer if isinstance(answer, (list, tuple)) else [answer]))

    def _call(self, value: object) -> ToolCall:
        if isinstance(value, ToolCall):
            return value
        if isinstance(value, Mapping) and isinstance(value.get("name"), str):
            arguments = value.get("arguments", {})
            if isinstance(arguments, Mapping) and set(value) <= {"name", "arguments"}:
                return ToolCall(value["name"], arguments)
        raise TaskError(
            f'{self._path}: act returned {value!r:.100}: return a list of {{"name": "read", "arguments": {{"path":'
            ' "a.py"}}'
        )


def agent_named(name: str) -> Agent:
    """Agent of this name: oracle, noop, or the script in a file. Raises TaskError."""
    if name in ("oracle", "noop"):
        return Oracle() if name == "oracle" else Noop()
    if not name.endswith(".py"):
        raise TaskError(f"no agent {name!r}: use oracle, noop, or the path of a .py file with `def act(observation)`")
    return Script(Path(name))


def agent_identity(name: str) -> str:
    """Name of an agent for keys: that of a script is its content's digest; modules that it imports do not count."""
    return f"script {sha256(Path(name).read_bytes())}" if name.endswith(".py") else name


@dataclass(frozen=True)
class Played:
    """One task with its graded episode."""

    task: Task
    turns: int
    calls: int
    diff: bytes
    """The final state."""
    verdict: Verdict
    sample: int = 0
    """Number of this attempt at the task, from 0."""


async def play_suite(
    tasks: Sequence[Task],
    agent: Agent,
    client: SandboxClient,
    verifier: Verifier,
    *,
    limits: Limits = Limits(),
    max_turns: int = MAX_TURNS,
    progress: Callable[[int, int], None] | None = None,
    samples: int = 1,
    keep: Callable[[Played], Awaitable[None]] | None = None,
) -> list[Played]:
    """Run the agent `samples` times on every task, each in its own sandbox, and grade the final state in another.

    Results are in the order of `tasks` and samples. keep: called with every graded episode as soon as it is there.

    Raises TaskError if the agent fails, InfraFault if envd keeps failing.
    """
    slots, done = asyncio.Semaphore(CONCURRENCY), 0

    async def one(task: Task, sample: int) -> Played:
        nonlocal done
        async with slots:
            played = await play_task(task, agent, client, verifier, limits=limits, max_turns=max_turns, sample=sample)
        if keep is not None:
            await keep(played)
        done += 1
        if progress is not None:
            progress(done, len(tasks) * samples)
        return played

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(task, sample)) for task in tasks for sample in range(samples)]
    except ExceptionGroup as faults:
        raise faults.exceptions[0] from None
    return [each.result() for each in running]


async def play_task(
    task: Task,
    agent: Agent,
    client: SandboxClient,
    verifier: Verifier,
    *,
    limits: Limits,
    max_turns: int,
    sample: int = 0,
) -> Played:
    """Run the agent on one task and grade it. sample: number of this attempt at the task."""
    turns: list[Turn] = []
    await verifier.provide(task)
    template, environment = await client.put_template(task.files, task.base), task.environment
    async with await client.create(
        template,
        limits=limits,
        env=environment.variables(task.files),
        runtime=environment.runtime,
        toolset=task.toolset,
        **recording(task.final_state),
    ) as sandbox:
        while len(turns) < max_turns:
            observation = Observation(task.task_id, task.instruction, tuple(turns), sample)
            calls = await asyncio.to_thread(agent.act, task, observation)
            if not calls:
                break
            turns.append(Turn(tuple(calls), tuple(await sandbox.batch(calls, timeout_s=TOOL_TIMEOUT_S))))
        diff = await sandbox.finish(export=Export(task.deliverables) if task.deliverables else None)
        if isinstance(task.final_state, AnswerState):
            diff = final_answer(_answers(turns), "")
        elif isinstance(task.final_state, RequestsState):
            diff = sandbox.requests
    calls_made = sum(len(turn.calls) for turn in turns)
    return Played(task, len(turns), calls_made, diff, await verifier.grade(task, diff), sample)


def _requesting(state: RequestsState) -> str:
    """Command that makes the expected requests."""
    made = [(each.method, *each.address, each.path, each.text) for each in state.requests for _ in range(each.count)]
    return f"echo {base64.b64encode(json.dumps(made).encode()).decode()} | python3 -c {shlex.quote(_REQUESTS)}"


_REQUESTS = """
import base64, http.client, json, sys
for method, host, port, path, body in json.loads(base64.b64decode(sys.stdin.read())):
    proxy = http.client.HTTPConnection("127.0.0.1", 3128, timeout=20)
    proxy.request(method, f"http://{host}:{port}{path}", body.encode() or None)
    print(proxy.getresponse().status)
"""


def _answers(turns: Sequence[Turn]) -> list[Any]:
    """Answers that were submitted, in order."""
    pairs = [pair for turn in turns for pair in zip(turn.calls, turn.results, strict=True)]
    return [call.arguments["answer"] for call, result in pairs if result.ok and call.name == SUBMIT_ANSWER]


def _load(path: Path) -> Callable[[Observation], Any]:
    spec = importlib.util.spec_from_file_location("triplane_agent_script", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise TaskError(f"agent script {path} does not exist: give a .py file with `def act(observation)`")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise TaskError(f"agent script {path} can't be loaded: {type(error).__name__}: {error}") from error
    act = getattr(module, "act", None)
    if not callable(act) or inspect.iscoroutinefunction(act):
        raise TaskError(f"agent script {path} has no plain function `act`: write `def act(observation)`")
    checked: Callable[[Observation], Any] = act
    return checked
