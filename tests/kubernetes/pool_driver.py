"""A pod of the step pool whose steps do what their arguments say, instead of Dagster.

python -m tests.kubernetes.pool_driver PORT FOLDER
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from contracts.rpc.listening import Listening
from triplane_dagster import step_worker
from triplane_dagster.step_worker import StepPool, serve

IMAGE = "triplane:1"


def act(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """`exit CODE`, `killed`, `sleep FILE`, `stubborn FILE`, `leave FILE`; FILE gets pids."""
    what, *rest = arguments
    if what == "exit":
        print(environment["WORD"], flush=True)
        sys.exit(int(rest[0]))
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    file = Path(rest[0])
    left = subprocess.Popen(["sleep", "600"], start_new_session=True)
    if what == "sleep":
        signal.signal(signal.SIGTERM, lambda *_: (file.with_suffix(".told").touch(), sys.exit(0)))
    if what == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    file.with_suffix(".new").write_text(f"{os.getpid()} {left.pid}")
    file.with_suffix(".new").rename(file)
    if what != "leave":
        time.sleep(600)


async def main(port: str, folder: str) -> None:
    step_worker._PRELOADED[:] = ["tests.kubernetes.pool_driver"]
    step_worker.GRACE_S, step_worker.CLAIM_S = 1.0, 1.0
    await serve(Listening(f"127.0.0.1:{port}", insecure=True), StepPool(Path(folder), IMAGE, act))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
