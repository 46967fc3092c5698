"""One part of the `kernels` benchmark in a separate process, so that a crash or hang of a kernel loses only that part.

`python -m benchmarks.kernels_process PART` reads {"repeats": n, "ceilings": {...}} and writes one line of JSON for each
`Measured`.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import torch

from benchmarks.kernels_case import REAL, Measured
from benchmarks.kernels_clock import Clock

COMMAND = [sys.executable, "-m", "benchmarks.kernels_process"]


class Lost(Exception):
    """The rest of a part could not be measured; the message gives the reason."""


def measured_apart(
    part: str, repeats: int, ceilings: dict[str, float], patience: float, deadline: float
) -> Iterator[Measured]:
    """Results of the part's process, as they arrive.

    Raises Lost if it dies, is silent for `patience` seconds, or reaches the deadline (monotonic clock).
    """
    worker = subprocess.Popen(
        [*COMMAND, part], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    complaints: list[str] = []

    def listen() -> None:
        for line in worker.stdout or ():
            said.put(line)
        said.put(None)

    def hear_complaints() -> None:
        for line in worker.stderr or ():
            complaints[:] = [*complaints[-9:], line.strip()]

    threads = [threading.Thread(target=target, daemon=True) for target in (listen, hear_complaints)]
    for thread in threads:
        thread.start()
    try:
        with contextlib.suppress(BrokenPipeError):
            assert worker.stdin is not None
            worker.stdin.write(json.dumps({"repeats": repeats, "ceilings": ceilings}))
            worker.stdin.close()
        while True:
            try:
                line = said.get(timeout=max(min(patience, deadline - time.monotonic()), 0))
            except queue.Empty:
                over = time.monotonic() >= deadline
                raise Lost("time limit reached" if over else f"no result in {patience:g} seconds: killed") from None
            if line is None:
                break
            yield Measured.from_json(line)
        if worker.wait() != 0:
            threads[1].join(5)
            raise Lost(f"ended with status {worker.returncode}: {(complaints or ['no message'])[-1][:300]}")
    finally:
        worker.kill()
        worker.wait()


def main() -> int:
    """Measure the part given on the command line."""
    from benchmarks.kernels_parts import measure

    order = json.load(sys.stdin)
    torch.manual_seed(0)
    clock = Clock(torch.device("cuda", torch.cuda.current_device()), order["repeats"])
    if sys.argv[1] == "ceilings":
        print(Measured(None, clock.ceilings()).to_json(), flush=True)
        return 0
    for found in measure(sys.argv[1], REAL, clock, order["ceilings"]):
        print(found.to_json(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
