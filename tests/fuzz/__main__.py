"""Fuzzes what the agent and the spawner parse: `python -m tests.fuzz --seconds 600 [--seed N]`, or `make fuzz-frames
SECONDS=600`.

    recorded frames -> mutated -> agent under ASan and UBSan, on a plain stream and on an escaped one -> what it reached
    decides what is mutated next
    requests        -> mutated -> spawner under ASan and UBSan, which really starts sandboxes

It ends with code 1 at the first input that one of them does not stand, with the sanitizer's words and the last inputs.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from envd.native.build import BuildError
from tests.fuzz.agents import AgentTarget, Finding, build_agent
from tests.fuzz.spawners import SpawnerTarget, build_spawner

_SETTLE_EVERY = 200


def main() -> int:
    """Fuzz for a while; the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.split("\n\n")[0] if __doc__ else None
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="of the mutations; drawn and printed when not given")
    options = parser.parse_args()
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as work:
        Path(work).chmod(0o755)
        try:
            return _fuzz(Path(work), options.seconds, seed)
        except BuildError as error:
            print(error, file=sys.stderr)
            return 2


def _fuzz(work: Path, seconds: float, seed: int) -> int:
    program = build_agent(work)
    agents = [AgentTarget(program, work / str(escaped), seed + escaped, escaped=escaped) for escaped in (False, True)]
    spawner = SpawnerTarget(build_spawner(work), seed)
    began, told = time.monotonic(), 0.0
    try:
        while (passed := time.monotonic() - began) < seconds:
            for target in (agents[0], agents[0], agents[1], agents[0], agents[0], agents[1], spawner):
                target.step()
            if spawner.inputs % _SETTLE_EVERY == 0:
                spawner.settle()
            if passed - told > 30:
                told = passed
                print(_summary(agents, spawner, passed), flush=True)
        spawner.settle()
    except Finding as finding:
        print(f"FOUND: {finding}", file=sys.stderr)
        return 1
    finally:
        for target in (*agents, spawner):
            target.stop()
    print(_summary(agents, spawner, time.monotonic() - began) + "; nothing found", flush=True)
    return 0


def _summary(agents: list[AgentTarget], spawner: SpawnerTarget, seconds: float) -> str:
    said = [
        f"{each.name}: {each.inputs} inputs, {each.reached} blocks reached, corpus {each.seeds} -> {each.corpus}"
        for each in agents
    ]
    return f"{seconds:.0f} s on process {os.getpid()}; " + "; ".join(
        [*said, f"{spawner.name}: {spawner.inputs} requests, {spawner.started} sandboxes started"]
    )


if __name__ == "__main__":
    sys.exit(main())
