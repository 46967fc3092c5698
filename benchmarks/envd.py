"""Sandboxes through gRPC, one at a time: create, call, verify; beside a bare `unshare` of the same namespaces in the same run."""

from __future__ import annotations

import asyncio
import shutil
import subprocess

from pydantic import Field

from benchmarks.measure import median, percentile, seconds_awaited, seconds_of
from benchmarks.result import Options, Result
from envd.client import Sandbox, SandboxClient
from envd.local import LocalEnvd
from envd.types import ToolCall

MODULE = b"def add(a, b):\n    return a + b\n"
HIDDEN = b"from app import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n"
UNSHARE = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--net", "--ipc", "--uts", "true"]


class EnvdOptions(Options):
    """Options of the `envd` benchmark."""

    repeats: int = Field(100, ge=5, le=10_000)
    """Measurements of each operation."""


OPTIONS = EnvdOptions


def run(options: EnvdOptions) -> Result:
    """Start a server of our own, measure, stop it."""
    with LocalEnvd() as server:
        timings, isolated = asyncio.run(_measure(server.address, options.repeats))
    notes = (
        [] if isolated else ["the server runs without isolation here: these are not the namespaces backend's numbers"]
    )
    if shutil.which("unshare") and _unshare_works():
        timings["unshare"] = seconds_of(_unshare, repeats=options.repeats)
    else:
        notes.append("a bare unshare does not work here: nothing to compare with")
    metrics: dict[str, float] = {}
    for name, seconds in timings.items():
        metrics[f"{name}_p50_ms"] = median(seconds) * 1e3
        metrics[f"{name}_p99_ms"] = percentile(seconds, 99) * 1e3
    rows = [
        {"operation": name, "p50 ms": metrics[f"{name}_p50_ms"], "p99 ms": metrics[f"{name}_p99_ms"], "n": len(seconds)}
        for name, seconds in timings.items()
    ]
    return Result(metrics, rows, notes)


async def _measure(address: str, repeats: int) -> tuple[dict[str, list[float]], bool]:
    async with SandboxClient(address) as client:
        template = await client.put_template({"app.py": MODULE})
        made: list[Sandbox] = []

        async def create() -> None:
            made.append(await client.create(template))

        async def finish() -> None:
            await made.pop().finish()

        async def verify() -> None:
            await client.verify(template, b"", {"test_hidden.py": HIDDEN}, ["test_hidden.py::test_add"])

        found: dict[str, list[float]] = {"create": [], "finish": []}
        for _ in range(repeats):
            found["create"] += await seconds_awaited(create, repeats=1, warmups=0)
            found["finish"] += await seconds_awaited(finish, repeats=1, warmups=0)
        async with await client.create(template) as sandbox:
            read, shell = ToolCall("read", {"path": "app.py"}), ToolCall("exec", {"command": "true"})
            found["read"] = await seconds_awaited(lambda: sandbox.call(read), repeats=repeats)
            found["exec"] = await seconds_awaited(lambda: sandbox.call(shell), repeats=repeats)
        found["verify"] = await seconds_awaited(verify, repeats=repeats)
        return found, (await client.info()).isolation


def _unshare() -> None:
    subprocess.run(UNSHARE, check=True, capture_output=True)


def _unshare_works() -> bool:
    return subprocess.run(UNSHARE, check=False, capture_output=True).returncode == 0
