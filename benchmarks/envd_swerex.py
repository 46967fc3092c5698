"""SWE-ReX's local runtime, timed in a separate environment: a bash session without isolation, on this machine.

Triplane does not depend on its packages: the benchmark creates a virtual environment in the user's cache and runs this
file there as a script.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PACKAGE = "swe-rex==1.4.0"
_INSTALL_S = 300.0
_RUN_S = 300.0
Timings = dict[str, list[float]]


def measure_swerex(repeats: int, creations: int, notes: list[str]) -> Timings:
    """Seconds of create, exec and read, as for other peers; empty if it can't be installed, with the reason in
    `notes`.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "triplane" / "swe-rex"
    python = cache / "bin" / "python"
    try:
        if not (cache / "ready").exists():
            _tell([sys.executable, "-m", "venv", "--clear", str(cache)], _INSTALL_S)
            _tell([str(python), "-m", "pip", "install", "--quiet", PACKAGE], _INSTALL_S)
            (cache / "ready").touch()
        said = _tell([str(python), __file__, str(repeats), str(creations)], _RUN_S)
        found: Timings = json.loads(said.splitlines()[-1])
        return found
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        notes.append(f"SWE-ReX can't be run here: not compared ({error})")
        return {}


def _tell(command: list[str], timeout_s: float) -> str:
    return subprocess.run(
        command, check=True, timeout=timeout_s, stdin=subprocess.DEVNULL, capture_output=True, text=True
    ).stdout


async def _measure(repeats: int, creations: int) -> Timings:
    from swerex.runtime import abstract  # type: ignore[import-not-found]
    from swerex.runtime.local import LocalRuntime  # type: ignore[import-not-found]

    runtime = LocalRuntime()
    true = abstract.BashAction(command="/bin/true")
    found: Timings = {"create": [], "exec": [], "read": [], "cycle": []}

    async def timed(name: str, work: Any) -> None:
        begin = time.perf_counter()
        await work
        found[name].append(time.perf_counter() - begin)

    async def ready() -> None:
        await runtime.create_session(abstract.CreateBashSessionRequest(startup_timeout=30))
        await runtime.run_in_session(true)

    for number in range(creations):
        begin = time.perf_counter()
        await timed("create", ready())
        if number < creations - 1:
            await runtime.close_session(abstract.CloseBashSessionRequest())
            found["cycle"].append(time.perf_counter() - begin)
    for _ in range(repeats):
        await timed("exec", runtime.run_in_session(true))
        await timed("read", runtime.read_file(abstract.ReadFileRequest(path="/etc/hostname")))
    await runtime.close()
    return found


if __name__ == "__main__":
    import asyncio

    print(json.dumps(asyncio.run(_measure(int(sys.argv[1]), int(sys.argv[2])))))
