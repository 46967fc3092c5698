"""One client of the soak, a process that may be killed at any instant: `python -m benchmarks.envd_soak_client ADDRESS
SEED`.

It writes one line per sandbox to standard output: `done`, `lost` (the server or the sandbox ended meanwhile), or
`wrong` and the error.
"""

from __future__ import annotations

import asyncio
import random
import sys

from envd.client import Limits
from envd.errors import EnvdError, FileError
from envd.operations.client import ManagedSandbox, OperationsClient
from envd.types import ToolCall

LIFETIME_S = 15.0
"""Lifetime after which sandboxes of a killed client end."""
_AT_ONCE = 4
_LIMITS = Limits(memory_mb=128, pids=32, lifetime_s=LIFETIME_S)


async def live_once(client: OperationsClient, template: str, chance: random.Random, number: int) -> str:
    """Use one sandbox from creation to end. Returns the line to report."""
    try:
        sandbox = await client.create(template, limits=_LIMITS, env={"NUMBER": str(number)})
        wrong = await _act(sandbox, chance, number)
        if chance.random() < 0.95:  # the others end with their lifetime
            await sandbox.close()
    except FileError as error:
        return f"wrong {error}"
    except EnvdError:
        return "lost"
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


async def main(address: str, seed: int) -> None:
    """Run until killed, or until nobody reads the output."""
    chance, number = random.Random(seed), seed * 1_000_000

    async def work() -> None:
        nonlocal number
        while True:
            try:
                async with OperationsClient(address) as client:
                    template = await client.put_template({"app.py": b"x = 1\n"})
                    while True:
                        number += 1
                        said = await live_once(client, template, chance, number)
                        print(said, flush=True)
                        if said == "lost":
                            break  # the server will restart without this template
            except EnvdError:
                pass
            await asyncio.sleep(0.1)

    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1], int(sys.argv[2])))
    except BrokenPipeError:
        sys.exit(0)
