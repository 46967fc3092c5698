"""Flips: verdicts on tasks of a made suite, repeated beside busy processes.

Each task's fix and its unchanged repository are graded in turn, without a cache. A flip is a verdict that is wrong, or
in which a test ends otherwise than in the first one on the same state.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pydantic import Field

from benchmarks.result import Options, Result
from contracts.store import Store, open_store
from contracts.tasks import Task
from curation.tasks.factory.make import MakeConfig, make_suite
from curation.tasks.importing.splits import DEFAULT_SHARES
from curation.tasks.inspect import suite_tasks
from curation.verify import Verifier
from envd.client import SandboxClient
from envd.local import TRUSTED, LocalEnvd


class FlipsOptions(Options):
    """Options of the `flips` benchmark."""

    package: str = "toolz==1.0.0"
    """Pinned package whose source distribution holds tests."""
    count: int = Field(500, ge=1)
    """Tasks."""
    repeats: int = Field(10, ge=2)
    """Verdicts of each task."""
    load: int = Field(4, ge=0)
    """Busy processes beside the verifications."""
    folder: str = ""
    """Folder of the store with the suite, kept; default: a temporary one."""


OPTIONS = FlipsOptions
Seen = tuple[bool, tuple[tuple[str, str], ...]]
"""Whether a verdict is solved, and the status of each test."""


def run(options: FlipsOptions) -> Result:
    """Make the suite, or find it in the folder, and grade its tasks."""
    with ExitStack() as opened:
        scratch = opened.enter_context(tempfile.TemporaryDirectory(prefix="bench-flips-"))
        envd = opened.enter_context(LocalEnvd(rules=TRUSTED))
        store = open_store(str(Path(options.folder or scratch)))
        return asyncio.run(_run(options, store, envd.address))


async def _run(options: FlipsOptions, store: Store, address: str) -> Result:
    async with SandboxClient(address) as client:
        source = f"pypi:{options.package}"
        suite = await make_suite(source, MakeConfig(options.count), DEFAULT_SHARES, store, client)
        tasks = list(suite_tasks(suite, None).values())
        first: dict[tuple[str, bytes], Seen] = {}
        flips: list[str] = []
        with _busy(options.load):
            for number in range(options.repeats):
                verifier = Verifier(client, None, runtimes=store)
                states = [task.reference_diff if number % 2 == 0 else b"" for task in tasks]
                seen = await asyncio.gather(*(_grade(verifier, *each) for each in zip(tasks, states, strict=True)))
                for task, state, found in zip(tasks, states, seen, strict=True):
                    known = first.setdefault((task.task_id, state), found)
                    if found != known or found[0] != bool(state):
                        flips.append(f"{task.task_id}, {'fixed' if state else 'unchanged'}: {known} and {found}"[:300])
                print(f"{len(tasks) * (number + 1)} verdicts, {len(flips)} flips", file=sys.stderr, flush=True)
    metrics = {"verdicts": float(len(tasks) * options.repeats), "flips": float(len(flips))}
    return Result(metrics, notes=flips[:20], judged=options.count >= 500 and options.load >= 4)


async def _grade(verifier: Verifier, task: Task, state: bytes) -> Seen:
    verdict = await verifier.grade(task, state)
    return verdict.solved, tuple((test.name, test.status) for test in verdict.tests)


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """Keep this many processes busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
