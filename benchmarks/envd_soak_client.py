"""One client of the soak, a process that may be killed at any instant: `python -m benchmarks.envd_soak_client ADDRESS
SEED`.

It writes one line per sandbox to standard output: `done`, `wrong` and what was wrong, or that it was lost to an error
(`benchmarks.envd_soak_reports`).
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable

from benchmarks.envd_soak_reports import report_error
from envd.client import Limits
from envd.errors import EnvdError, FileError
from envd.operations.client import ManagedSandbox, OperationsClient
from envd.types import ToolCall

LIFETIME_S = 15.0
"""Lifetime after which sandboxes of a killed client end."""
RETRY_S = 0.1
"""Time from an error to the next connection."""
_AT_ONCE = 4
_LIMITS = Limits(memory_mb=128, pids=32, lifetime_s=LIFETIME_S)


async def live_once(client: OperationsClient, template: str, chance: random.Random, number: int) -> str:
    """Use one sandbox from creation to end. Returns the line to report. Raises EnvdError if it was lost."""
    try:
        sandbox = await client.create(template, limits=_LIMITS, env={"NUMBER": str(number)})
        wrong = await _act(sandbox, chance, number)
        if chance.random() < 0.95:  # the others end with their lifetime
            await sandbox.close()
    except FileError as error:
        return f"wrong {error}"
    return f"wrong {wrong}" if wrong else "done"


async def _act(sandbox: ManagedSandbox, chance: random.Random, number: int) -> str:
    act = chance.choice(("nothing", "exec", "files", "daemon", "process", "flood"))
    if act == "exec":
        result = await sandbox.call(ToolCall("exec", {"command": "echo $NUMBER"}))
        return "" if result.text == f"{number}\nexit 0" else f"exec: {result.text[:80]!r}"
    if act == "files":
        await sandbox.files.write("d/f", str(number).encode())
        found = await sandbox.files.read("d/f")
        return "" if found == str(number).encode() else f"files: {found[:80]!r}"
    if act == "daemon":
        result = await sandbox.call(ToolCall("exec", {"command": "setsid sleep 1000 >/dev/null 2>&1 & echo on"}))
        return "" if result.text == "on\nexit 0" else f"daemon: {result.text[:80]!r}"
    if act == "process":
        await sandbox.processes.start(["sleep", "1000"])
    if act == "flood":
        await sandbox.processes.start(["sh", "-c", "yes | head -c 20000000"])
    return ""


async def work(connect: Callable[[], OperationsClient], chance: random.Random, number: int) -> None:
    """Use sandboxes one after another until killed, or until nobody reads the output. number: of the first one."""
    while True:
        kind, since = "away", time.monotonic()
        try:
            async with connect() as client:
                template = await client.put_template({"app.py": b"x = 1\n"})
                while True:
                    # since the last answer: a template that a restarted server lacks was in use before the kill
                    kind, number = "lost", number + 1
                    said = await live_once(client, template, chance, number)
                    since = time.monotonic()
                    print(said, flush=True)
        except EnvdError as error:
            print(report_error(kind, since, error, LIFETIME_S), flush=True)
        await asyncio.sleep(RETRY_S)


async def main(address: str, seed: int) -> None:
    """Run concurrent workers, which use the server until this process is killed."""
    chance, first = random.Random(seed), seed * 1_000_000
    span = 1_000_000 // _AT_ONCE
    await asyncio.gather(
        *(work(lambda: OperationsClient(address), chance, first + worker * span) for worker in range(_AT_ONCE))
    )


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1], int(sys.argv[2])))
    except BrokenPipeError:
        sys.exit(0)
