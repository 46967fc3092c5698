"""A bridge whose engine loads weights when it is told to: `python -m tests.trainers.policy_server DIR VERSION SOCKET`.

Each line of its input, `DIR VERSION`, is a checkpoint to serve from now on; it is answered by the version.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from contracts.rpc.listening import Listening
from inference.bridge.serve import Options, limits_of, serving
from inference.engines.builtin import BuiltinEngine


async def main(directory: Path, version: str, socket: str) -> None:
    engine = BuiltinEngine(directory, version, threads=1)
    try:
        async with serving(engine, limits_of(directory), Options(Listening(f"unix:{socket}"))):
            print(version, flush=True)
            while line := await asyncio.to_thread(sys.stdin.readline):
                named, version = line.split()
                await engine.load_weights(Path(named), version)
                print(version, flush=True)
    finally:
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
