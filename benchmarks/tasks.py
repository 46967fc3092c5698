"""Tasks: suites made of packages of an index, without a setting for any: yields, time, and speed of the screen.

For each package, `triplane tasks make` runs in its own store; then the oracle, noop and an agent that searches its
sandbox for the solution (`tasks_attacker`) play tasks of the suite.
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
from curation.tasks.factory.make import MakeConfig, make_suite
from curation.tasks.importing.splits import DEFAULT_SHARES
from curation.tasks.inspect import suite_tasks
from curation.verify import Verifier
from envd.client import SandboxClient, ToolCall
from envd.local import TRUSTED, LocalEnvd

PACKAGES = (
    "attrs==26.1.0,boltons==26.2.0,cachetools==8.0.1,click==8.5.1,humanize==4.17.0,itsdangerous==2.2.0,jinja2==3.1.6,"
    "more-itertools==11.2.1,parse==1.22.4,sqlparse==0.6.1,tomlkit==0.15.2,toolz==1.0.0"
)
COUNT = 430


class TasksOptions(Options):
    """Options of the `tasks` benchmark."""

    packages: str = PACKAGES
    """Pinned packages whose source distributions hold tests, with commas between."""
    count: int = Field(COUNT, ge=1)
    """Tasks wanted of each package."""
    played: int = Field(50, ge=1)
    """Tasks of each package that the agents play, spread over its suite."""
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
    }
    whole = (options.packages, options.count) == (PACKAGES, COUNT)
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
        solved = [each.task.task_id for each in played if each.verdict.solved]
        scores[name] = len(solved) / len(played)
        if name == "search" and solved:
            row["note"] = f"found the solution of {', '.join(solved)}"[:200]
    splits = defaultdict[str, set[str]](set)
    for task in tasks:
        for place in (str(task.meta["path"]), str(task.meta["function"])):
            splits[place].add(task.split.value)
    shared = sum(len(each) > 1 for each in splits.values())
    return row | {"tasks": len(tasks), "seconds": seconds, "played": len(some), **scores, "in_two_splits": shared}
