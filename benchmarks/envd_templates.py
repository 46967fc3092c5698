"""Tasks of one repository, stored as overlays and sent to envd as patches of its tree: bytes on disk and time.

    base, sent once -> N templates that differ from it in two files -> the first sandbox of some of them

Whole templates are measured beside them: the same trees, sent without a base to a second server.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import Field

from benchmarks.measure import median, percentile
from benchmarks.result import Options, Result
from contracts.artifacts import ArtifactWriter
from contracts.rpc.connecting import prefer_short_round_trips
from contracts.store import open_store
from contracts.suites import add_tasks
from contracts.tasks import Split, Task
from envd.client import Limits, SandboxClient
from envd.local import TRUSTED, LocalEnvd

_FILES, _FOLDERS, _WORDS = 400, 60, 3000
_TASK_BYTES, _TREES = 4096, 3
"""What a task may take on disk, and what all may take beside it, in sizes of the tree."""
_SMALL = Limits(memory_mb=64)


class TemplateOptions(Options):
    """Options of the `envd-templates` benchmark."""

    count: int = Field(1000, ge=10, le=100_000)
    """Number of derived templates."""
    tree_mb: float = Field(5, gt=0, le=32)
    """Size of the repository, in MB; it has 400 files in 60 folders."""
    used: int = Field(20, ge=2, le=1000)
    """Number of templates of which a sandbox is started, and of whole templates."""
    backend: str = "auto"
    """Backend of the servers."""


OPTIONS = TemplateOptions
Tree = dict[str, bytes]


def run(options: TemplateOptions) -> Result:
    """Measure a server that derives templates, then one that gets whole ones."""
    prefer_short_round_trips()
    notes = [f"load average at the start: {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores"]
    base = _tree(int(options.tree_mb * 1e6))
    size = sum(map(len, base.values()))
    notes.append(f"tree: {len(base)} files, {size / 1e6:.1f} MB")
    variants = [_variant(base, number) for number in range(options.count)]
    rows: list[dict[str, float]] = []
    for shared, trees in ((base, variants), (None, variants[: options.used])):
        with LocalEnvd(options.backend, log_level="error", rules=TRUSTED) as server:
            rows.append(asyncio.run(_measure(server.address, shared, trees, options.used)))
    derived, whole = rows
    stored = _stored(base, variants)
    allowed = _TREES * size + _TASK_BYTES * options.count
    return Result(
        {
            "derive_p50_ms": derived["put p50, ms"],
            "disk_of_allowed": (derived["disk, MB"] * 1e6 + stored) / allowed,
            "suite_mb": stored / 1e6,
            "first_sandbox_p50_ms": derived["first sandbox p50, ms"],
            "first_sandbox_of_whole_p50_ms": whole["put p50, ms"] + whole["first sandbox p50, ms"],
        },
        [{"templates": "derived"} | derived, {"templates": "whole"} | whole],
        notes,
    )


async def _measure(address: str, base: Mapping[str, bytes] | None, trees: list[Tree], used: int) -> dict[str, float]:
    places = [Path(address.removeprefix("unix:")).with_name(name) for name in ("templates", "patches")]
    async with SandboxClient(address) as client:
        if base is not None:
            await client.put_template(base)
            await client.put_template(trees[0] | {"warm": b""}, base)
        puts, digests = [], []
        for tree in trees:
            begin = time.perf_counter()
            digests.append(await client.put_template(tree, base))
            puts.append(time.perf_counter() - begin)
        disk = _disk(*places)
        starts = []
        for digest in digests[:used]:
            begin = time.perf_counter()
            async with await client.create(digest, limits=_SMALL):
                starts.append(time.perf_counter() - begin)
        return {
            "count": len(trees),
            "put p50, ms": median(puts) * 1e3,
            "put p99, ms": percentile(puts, 99) * 1e3,
            "disk, MB": disk / 1e6,
            "first sandbox p50, ms": median(starts) * 1e3,
            "disk after use, MB": _disk(*places) / 1e6,
        }


def _stored(base: Tree, trees: list[Tree]) -> int:
    """Bytes on disk of a store with a suite of these trees."""
    tasks = [
        Task(f"task-{number}", "made", Split.TRAIN, "Fix it.", tree, {}, ("test_it.py::test",), b"", {}, base=base)
        for number, tree in enumerate(trees)
    ]
    with tempfile.TemporaryDirectory() as root:
        store = open_store(root)
        with ArtifactWriter(store, "task_suite", "0" * 64, parents={}, config={}, code_version="1") as out:
            add_tasks(out, tasks)
            out.commit()
        return _disk(Path(root))


def _disk(*roots: Path) -> int:
    """Bytes that directories and what they hold take on disk, in blocks. What is being removed may be counted."""
    total = 0
    for root in roots:
        for above, _, names in os.walk(root):
            for path in (Path(above), *(Path(above, name) for name in names)):
                with suppress(FileNotFoundError):
                    total += path.lstat().st_blocks * 512
    return total


def _tree(size: int) -> Tree:
    """Files of lines as programs have them, which compress to about a third."""
    rng = random.Random(0)
    words = [f"name_{number}" for number in range(_WORDS)]
    files = {}
    for number in range(_FILES):
        lines, left = [], size // _FILES
        while left > 0:
            lines.append("    " * rng.randint(0, 3) + " = ".join(rng.choices(words, k=3)) + "\n")
            left -= len(lines[-1])
        files[f"pkg{number % 6}/mod{number % _FOLDERS}/file{number}.py"] = "".join(lines).encode()
    return files


def _variant(base: Tree, number: int) -> Tree:
    """The tree of a task: one line changed in a file, five lines removed from another."""
    rng = random.Random(number)
    one, other = rng.sample(sorted(base), 2)
    lines, less = base[one].splitlines(True), base[other].splitlines(True)
    lines[rng.randrange(len(lines))] = b"broken = %d\n" % number
    at = rng.randrange(len(less))
    return base | {one: b"".join(lines), other: b"".join(less[:at] + less[at + 5 :])}
