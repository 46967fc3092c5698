"""Stragglers: iterations in which a few episodes take twenty times as long, sampled in three ways.

    all          every episode is waited for
    carry over   enough groups are waited for; the others go on in the next iteration (`rollouts.carry_over`)
    first        more episodes are started than kept, and the slowest are dropped (`rollouts.keep: first`)

Only the engine is simulated: a turn takes a fixed time, whatever the batch. Workers, sandboxes, store and merge are
real. The lengths of a task's episodes are the same in each way, so the samples of lengths can be compared.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field
from scipy.stats import ks_2samp

from benchmarks.measure import median
from benchmarks.result import Options, Result
from contracts.artifacts import Artifact, ArtifactRef, find_artifact
from contracts.chat import ChatTokenizer, ToolCallText
from contracts.digests import digest_of
from contracts.episodes import STRAGGLERS, Episode, Outcome, read_episodes
from contracts.store import LocalStore
from contracts.tasks import Split, Task
from curation.tokenizer import train_tokenizer
from envd.client import SandboxClient
from envd.local import LocalEnvd
from inference.engines.base import Completion, SamplingParams, StreamsWhole
from inference.rollouts.carry_over import UNFINISHED, carried_groups, read_unfinished
from inference.rollouts.config import RolloutConfig
from inference.rollouts.ledger import VARIABLE, read_ledger
from inference.rollouts.merge import merge_groups
from inference.rollouts.plan import CARRIED_OVER, GroupPlan, RolloutPlan, draw_prompts
from inference.rollouts.worker import run_shard

WAYS = ("all", "carry over", "first")
SHARE_OF_LONG, TIMES_LONGER = 0.02, 20
SPREAD = 0.5
"""Standard deviation of the logarithm of a length."""


class StragglersOptions(Options):
    """Options of the `stragglers` benchmark."""

    iterations: int = Field(3, ge=2, le=100)
    """Iterations of each way."""
    groups: int = Field(32, ge=2, le=10_000)
    """Groups that an iteration keeps."""
    group_size: int = Field(8, ge=2, le=1024)
    """Episodes of a group."""
    carry_over: int = Field(8, ge=1, le=10_000)
    """Groups in flight beyond those, for the way `carry over`."""
    max_carries: int = Field(2, ge=1, le=100)
    """Times that a group may be carried over."""
    oversample: int = Field(2, ge=1, le=1024)
    """Episodes started for each group beyond those kept, for the way `first`."""
    turns: float = Field(5, ge=2)
    """Median length of an episode, in turns."""
    turn_ms: float = Field(150, ge=1)
    """Simulated milliseconds of a turn."""
    repeats: int = Field(3, ge=1, le=100)
    """Runs of each way, alternating; times are medians."""


OPTIONS = StragglersOptions


@dataclass(frozen=True)
class Measured:
    """One way, over all iterations."""

    seconds: list[float]
    """Of each iteration."""
    lengths: list[int]
    """Turns of each episode that trains."""
    sampled: int
    """Tokens in the ledger, which every turn writes to."""
    trained: int
    carried: int
    """Tokens of what the last iteration left unfinished."""
    missing: int
    """Planned episodes that are missing or shortened."""

    @property
    def lost(self) -> int:
        """Tokens that were neither trained nor are carried on."""
        return self.sampled - self.trained - self.carried


def run(options: StragglersOptions) -> Result:
    """Sample in each way, each time in a process of its own, which keeps a ledger."""
    found: dict[str, list[Measured]] = {way: [] for way in WAYS}
    for _ in range(options.repeats):
        for way, runs in found.items():
            with tempfile.TemporaryDirectory(prefix="bench-stragglers-") as scratch:
                runs.append(_in_a_process(way, options, Path(scratch)))
    seconds = {way: median([sum(each.seconds) for each in runs]) for way, runs in found.items()}
    unhurried = found["all"][0].lengths
    # the least and the most favourable of all runs
    p_values = {way: [float(ks_2samp(each.lengths, unhurried).pvalue) for each in runs] for way, runs in found.items()}
    lost = [100 * each.lost / each.sampled for each in found["carry over"]]
    metrics = {
        "time_over_all": seconds["carry over"] / seconds["all"],
        "lengths_p_value": min(p_values["carry over"]),
        "lengths_p_value_first": max(p_values["first"]),
        "lost_percent": max(lost),
        "episodes_missing": max(each.missing for way in ("all", "carry over") for each in found[way]),
        "kept_over_all": min(len(each.lengths) for each in found["carry over"]) / len(unhurried),
    }
    rows: list[dict[str, Any]] = [
        {
            "way": way,
            "seconds": " ".join(f"{each:.1f}" for each in runs[0].seconds),
            "in all": round(seconds[way], 1),
            "episodes": len(runs[0].lengths),
            "mean turns": round(sum(runs[0].lengths) / len(runs[0].lengths), 2),
            "longest": max(runs[0].lengths),
            "KS p": f"{min(p_values[way]):.2g}",
            "tokens": runs[0].sampled,
            "trained": runs[0].trained,
            "carried": runs[0].carried,
            "lost": runs[0].lost,
            "missing": max(each.missing for each in runs),
        }
        for way, runs in found.items()
    ]
    notes = [
        f"lengths: lognormal with a median of {options.turns:g} turns and sigma {SPREAD}, {SHARE_OF_LONG:.0%} of them"
        f" {TIMES_LONGER} times longer; a turn takes {options.turn_ms:g} simulated ms, for any number of episodes",
        "seconds: of each iteration of the first run; in all: median of all runs; KS p: the lowest of all runs,"
        " two-sided, against the lengths of the way `all`",
        "lost: tokens in the ledger that neither train nor are carried on; `first` keeps them in the table of episodes",
        "missing: the most of all runs; planned episodes that neither train at their planned length nor are carried on",
    ]
    return Result(metrics, rows, notes)


def _in_a_process(way: str, options: StragglersOptions, scratch: Path) -> Measured:
    """Measure in a new process: the ledger's folder is read when its module is imported."""
    os.environ[VARIABLE] = str(scratch / "ledger")
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(_measure, way, options, scratch).result()
    finally:
        del os.environ[VARIABLE]


def _measure(way: str, options: StragglersOptions, scratch: Path) -> Measured:
    store = LocalStore(scratch / "store")
    tasks = {
        task.task_id: task for task in (_task(number) for number in range(4 * options.groups * options.iterations))
    }
    tokenizer = ChatTokenizer(train_tokenizer((), (), 300))
    seconds: list[float] = []
    planned: dict[tuple[str, int], int] = {}
    episodes: list[Episode] = []
    unfinished: Artifact | None = None
    cursor = 0
    with LocalEnvd(log_level="error") as server:
        for iteration in range(options.iterations):
            plan, cursor = _plan(way, options, iteration, cursor, tasks, unfinished)
            planned |= {
                (group.group_id, sample): _length(options, group.task_id, sample)
                for group in plan.groups
                for sample in range(plan.config.episodes_started)
            }
            began = time.perf_counter()
            asyncio.run(_sample(plan, server.address, tokenizer, tasks, store, options))
            merged = merge_groups(plan, store)
            seconds.append(time.perf_counter() - began)
            found = read_episodes(merged.table("episodes.parquet"), merged.table("sequences.parquet"))
            episodes += (each for each in found if each.outcome not in STRAGGLERS)
            unfinished = find_artifact(store, UNFINISHED, plan.key)
    sampled = sum(each.tokens for each in read_ledger(scratch / "ledger"))
    carried = [each for group in read_unfinished(unfinished).values() for each in group.values()] if unfinished else []
    return Measured(
        seconds,
        lengths=[each.turns for each in episodes],
        sampled=sampled,
        trained=sum(each.policy_tokens for each in episodes),
        carried=sum(each.policy_tokens for each in carried),
        missing=count_missing(planned, (*episodes, *carried)),
    )


def count_missing(planned: Mapping[tuple[str, int], int], episodes: Iterable[Episode]) -> int:
    """Number of planned episodes that are neither complete at their planned length nor to be continued.

    planned: turns by group_id and sample. episodes: those that train, and those that are carried on.
    """
    slots = (((each.group_id, each.sample), each) for each in episodes)
    kept = {slot for slot, each in slots if each.outcome is Outcome.UNFINISHED or each.turns == planned[slot]}
    return len(planned.keys() - kept)


def _task(number: int) -> Task:
    return Task(
        task_id=f"task-{number:05d}",
        family="constant",
        split=Split.TRAIN,
        instruction=f"Read m.py, task {number}.",
        files={"m.py": f"def f(): return {number}\n".encode()},
        hidden_files={},
        tests=("test_m.py::test_f",),
        reference_diff=b"",
        meta={},
    )


def _plan(
    way: str,
    options: StragglersOptions,
    iteration: int,
    cursor: int,
    tasks: dict[str, Task],
    unfinished: Artifact | None,
) -> tuple[RolloutPlan, int]:
    """Plan of an iteration, with the cursor of the next one."""
    config: dict[str, Any] = {}
    if way == "carry over":
        config = {"carry_over": options.carry_over, "max_carries": options.max_carries}
    elif way == "first":
        config = {"oversample": options.oversample}
    carried: list[GroupPlan] = []
    if unfinished is not None:
        carried = carried_groups(unfinished, {task_id: task.digest for task_id, task in tasks.items()})
    groups, _, after = draw_prompts(
        sorted(tasks),
        count=options.groups + config.get("carry_over", 0),
        reserve=0,
        cursor=cursor,
        seed=0,
        iteration=f"{iteration:04d}",
        carried=carried,
    )
    digest = digest_of(["policy", iteration])
    plan = RolloutPlan(
        experiment="stragglers",
        iteration=f"{iteration:04d}",
        seed=0,
        key=digest_of([way, iteration]),
        policy=ArtifactRef(kind="checkpoint", key=digest, digest=digest),
        groups=groups,
        reserve=[],
        workers=1,
        config=RolloutConfig(
            group_size=options.group_size,
            max_turns=1000,
            max_tokens=1_000_000,
            episode_timeout_s=86_400,
            concurrency=65_536,
            refill=False,
            profile="throughput",
            **config,
        ),
        inputs={CARRIED_OVER: unfinished.ref} if unfinished else {},
        needed=options.groups if way == "carry over" else None,
    )
    return plan, after


async def _sample(
    plan: RolloutPlan,
    address: str,
    tokenizer: ChatTokenizer,
    tasks: dict[str, Task],
    store: LocalStore,
    options: StragglersOptions,
) -> None:
    turns = {
        plan.slot(group, sample).token_seed: _length(options, group.task_id, sample)
        for group in plan.groups
        for sample in range(plan.config.episodes_started)
    }
    engine = TimedEngine(tokenizer, plan.policy.digest, turns, options.turn_ms / 1e3)
    async with SandboxClient(address) as client:
        await run_shard(
            *(plan, 0),
            engine=engine,
            sandboxes=client,
            tokenizer=tokenizer,
            tasks=tasks,
            store=store,
            grader=_Grader(),
        )


def _length(options: StragglersOptions, task_id: str, sample: int) -> int:
    """Turns of one episode."""
    dice = random.Random(f"{task_id} {sample}")
    longer = TIMES_LONGER if dice.random() < SHARE_OF_LONG else 1
    return max(2, round(options.turns * longer * dice.lognormvariate(0, SPREAD)))


class TimedEngine(StreamsWhole):
    """Answers each turn after a fixed time: reads a file until the episode is as long as it shall be, then ends it."""

    def __init__(self, tokenizer: ChatTokenizer, version: str, turns: dict[int, int], turn_s: float) -> None:
        """turns: length of each episode by its seed. turn_s: seconds of a turn."""
        self._version, self._turns, self._turn_s = version, turns, turn_s
        self._read = tokenizer.policy_turn([ToolCallText("read", {"path": "m.py"})])
        self._end = [*tokenizer.encode_text("done"), tokenizer.end_of_turn]
        self._call_end = tokenizer.call_end

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See Engine.generate."""
        await asyncio.sleep(self._turn_s)
        taken = list(prompt_ids).count(self._call_end)
        ids = self._read if taken + 1 < self._turns[params.seed] else self._end
        return Completion(list(ids), [-0.1] * len(ids), [(self._version, 0, len(ids))], "stop")

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """See Engine.score."""
        return [0.0] * len(token_ids)

    async def load_weights(self, directory: Path, version: str) -> None:
        """See Engine.load_weights."""
        self._version = version

    async def version(self) -> str:
        """See Engine.version."""
        return self._version

    async def close(self) -> None:
        """See Engine.close."""


class _Grader:
    """Solves nothing: no verdict changes what is sampled here."""

    solved = False

    async def grade(self, task: Task, diff: bytes) -> _Grader:
        return self
