"""Tasks: suites made of packages of an index, without a setting for any: yields, time, and speed of the screen.

For each package, `triplane tasks make` runs in its own store; then the oracle, noop and an agent that searches its
sandbox for the solution (`tasks_attacker`) play tasks of the suite. The screen is compared with one pytest process in
a sandbox for each candidate, on the same candidates and tests.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from benchmarks import tasks_attacker
from benchmarks.result import Options, Result
from contracts.errors import TriplaneError
from contracts.store import open_store
from contracts.tasks import Task
from curation.tasks.agents import Agent, Observation, agent_named, play_suite
from curation.tasks.factory.baseline import Baseline, run_baseline
from curation.tasks.factory.environment import surroundings_of
from curation.tasks.factory.guest import Guest
from curation.tasks.factory.make import MakeConfig, covered_functions, draw, make_suite
from curation.tasks.factory.screen import screen
from curation.tasks.factory.source import Repository, read_repository
from curation.tasks.factory.strategies import Candidate, Context, strategy_named
from curation.tasks.importing.splits import DEFAULT_SHARES
from curation.tasks.inspect import suite_tasks
from curation.verify import Verifier
from envd.client import SandboxClient, ToolCall
from envd.local import TRUSTED, LocalEnvd

PACKAGES = (
    "attrs==26.1.0,boltons==26.2.0,cachetools==8.0.1,click==8.5.1,humanize==4.17.0,itsdangerous==2.2.0,jinja2==3.1.6,"
    "more-itertools==11.2.1,parse==1.22.4,sqlparse==0.6.1,tomlkit==0.15.2,toolz==1.0.0"
)


class TasksOptions(Options):
    """Options of the `tasks` benchmark."""

    packages: str = PACKAGES
    """Pinned packages whose source distributions hold tests, with commas between."""
    count: int = Field(500, ge=1)
    """Tasks wanted of each package."""
    played: int = Field(50, ge=1)
    """Tasks of each package that the agents play, spread over its suite."""
    compared: int = Field(20, ge=0)
    """Candidates of the first package that are also run in one pytest process each."""
    folder: str = ""
    """Folder of the stores, kept for resuming; default: a temporary one."""


OPTIONS = TasksOptions
_AGENTS = ("oracle", "noop", "search")


class Searcher:
    """Agent that runs `tasks_attacker` with path and name of the function to be mended."""

    def act(self, task: Task, observation: Observation) -> Sequence[ToolCall]:
        """Calls that write and run the program, then no calls."""
        if observation.turns:
            return ()
        path, _, name = str(task.meta["function"]).partition("::")
        program = Path(tasks_attacker.__file__).read_text()
        command = f"mv .search.py /tmp/search.py && python /tmp/search.py {shlex.quote(path)} {shlex.quote(name)}"
        return ToolCall("write", {"path": ".search.py", "content": program}), ToolCall("exec", {"command": command})


def run(options: TasksOptions) -> Result:
    """Make all suites, one after the other."""
    with tempfile.TemporaryDirectory(prefix="bench-tasks-") as scratch, LocalEnvd(rules=TRUSTED) as envd:
        return asyncio.run(_run(options, Path(options.folder or scratch), envd.address))


async def _run(options: TasksOptions, folder: Path, address: str) -> Result:
    rows: list[dict[str, Any]] = []
    packages = options.packages.split(",")
    async with SandboxClient(address) as client:
        for pin in packages:
            print(f"{pin} ...", file=sys.stderr, flush=True)
            rows.append(await _package(pin, options, folder / pin.split("==")[0], client))
            print(rows[-1], file=sys.stderr, flush=True)
        speedup = await _speedup(packages[0], options.compared, folder / "screen", client) if options.compared else {}
    working = [row for row in rows if row["tasks"]]
    metrics = {
        "packages_that_work": float(len(working)),
        "share_of_packages": len(working) / len(rows),
        "tasks": float(sum(row["tasks"] for row in rows)),
        "minutes": sum(row["seconds"] for row in rows) / 60,
        "oracle_score": min((row["oracle"] for row in working), default=0.0),
        "noop_score": max((row["noop"] for row in working), default=1.0),
        "search_score": max((row["search"] for row in working), default=1.0),
        "searched": float(sum(row["played"] for row in rows)),
        "in_two_splits": float(sum(row["in_two_splits"] for row in rows)),
        **speedup,
    }
    whole = (options.packages, options.count) == (PACKAGES, 500)
    return Result(metrics, rows, judged=whole)


async def _package(pin: str, options: TasksOptions, folder: Path, client: SandboxClient) -> dict[str, Any]:
    store, began = open_store(str(folder)), time.perf_counter()
    row: dict[str, Any] = {"package": pin, "tasks": 0, "seconds": 0.0, "played": 0, **dict.fromkeys(_AGENTS, 0.0)}
    row |= {"in_two_splits": 0, "note": ""}
    try:
        suite = await make_suite(f"pypi:{pin}", MakeConfig(options.count), DEFAULT_SHARES, store, client)
    except TriplaneError as error:
        return row | {"seconds": round(time.perf_counter() - began, 1), "note": str(error)[:200]}
    seconds = round(time.perf_counter() - began, 1)
    tasks = list(suite_tasks(suite, None).values())
    some = tasks[:: max(1, -(-len(tasks) // options.played))]
    scores = {}
    for name in _AGENTS:
        agent: Agent = Searcher() if name == "search" else agent_named(name)
        played = await play_suite(some, agent, client, Verifier(client, None, runtimes=store))
        scores[name] = sum(each.verdict.solved for each in played) / len(played)
    splits = defaultdict[str, set[str]](set)
    for task in tasks:
        for place in (str(task.meta["path"]), str(task.meta["function"])):
            splits[place].add(task.split.value)
    shared = sum(len(each) > 1 for each in splits.values())
    return row | {"tasks": len(tasks), "seconds": seconds, "played": len(some), **scores, "in_two_splits": shared}


async def _speedup(pin: str, count: int, folder: Path, client: SandboxClient) -> dict[str, float]:
    """Candidates a second of the screen, and of one pytest process for each."""
    store = open_store(str(folder))
    repository = read_repository(f"pypi:{pin}", store)
    guest = Guest(client, repository.tree, surroundings_of(repository, store), slots=1)
    baseline = await run_baseline(repository, guest, store)
    functions = covered_functions(repository, baseline)
    context = Context(repository, functions, baseline.lines, 0, most=count)
    candidates = draw(list(strategy_named("mutate")(context)), MakeConfig(count))
    few = candidates[:count]
    began = time.perf_counter()
    screening = await screen(candidates, {each.key: each for each in functions}, baseline, guest, store)
    screened = len(candidates) / (time.perf_counter() - began)
    covering = {each.candidate.identity: each.covering for each in screening.kept}
    began = time.perf_counter()
    for each in few:
        await _one_process(repository, baseline, each, covering.get(each.identity, ()), client)
    alone = len(few) / (time.perf_counter() - began)
    return {"screened_per_second": screened, "processes_per_second": alone, "screen_speedup": screened / alone}


async def _one_process(
    repository: Repository, baseline: Baseline, candidate: Candidate, tests: Sequence[str], client: SandboxClient
) -> None:
    names = " ".join(sorted(tests or list(baseline.good)[:1]))
    command = f"python -m pytest -q -p no:cacheprovider --import-mode=importlib {names}"
    async with await client.create(await client.put_template(candidate.apply(repository.tree))) as sandbox:
        await sandbox.call(ToolCall("exec", {"command": command, "timeout_s": 120}), timeout_s=120)
