"""Find launch configurations for this machine's GPU and write them into the package: `python -m triplane_kernels.tune`.

    work: every op's shapes --> worker (a process: may crash or hang) --tried, found--> this process -->
    tuned/<device>.json after each shape

If a worker dies, or needs longer than --patience for one configuration, it is killed; the configuration is skipped with
a note, and another worker continues. Stops after --seconds; the next run continues with the remaining shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from triplane_kernels.machine import machine
from triplane_kernels.tune_worker import load_workloads
from triplane_kernels.tuning import Config, Shape, Table, device_file, read_table, write_table

DONE = "workloads done"
"""Key of the table with the finished workloads, as "op 4096x8192"."""
WORKER = [sys.executable, "-m", "triplane_kernels.tune_worker"]
Work = tuple[str, Shape]


@dataclass
class Tuning:
    """Remaining work and results."""

    path: Path
    table: Table
    work: list[Work]
    patience: float
    """Time limit of one configuration, compiled and timed, in seconds."""
    deadline: float
    """Deadline on the monotonic clock."""
    skipped: list[tuple[str, Config]] = field(default_factory=list)

    def run(self) -> None:
        """Run workers in sequence until no work or time is left."""
        while self.work and time.monotonic() < self.deadline:
            before = len(self.work), len(self.skipped)
            self._worker()
            if (len(self.work), len(self.skipped)) == before and time.monotonic() < self.deadline:
                op, shape = self.work.pop(0)
                _note(f"{op} {_name(shape)}: the worker ended before its first configuration; skipped")

    def _worker(self) -> None:
        """Run one worker until it ends, hangs or reaches the deadline."""
        trying: tuple[str, Config] | None = None
        with _started({"work": self.work, "skipped": self.skipped}) as worker:
            for line in _lines(worker, self.patience, self.deadline):
                message = json.loads(line)
                if "trying" in message:
                    trying = (message["trying"][0], message["trying"][1])
                    continue
                trying = None
                op, shape = message.get("done") or message["failed"]
                self.work.remove((op, tuple(shape)))
                if "failed" in message:
                    _note(f"{op} {_name(shape)}: {message['why']}")
                else:
                    self._keep(op, shape, message["found"])
            over = time.monotonic() >= self.deadline
            ended = "hung" if worker.poll() is None else f"ended with status {worker.poll()}"
        if trying is not None and not over:
            self.skipped.append(trying)
            _note(f"{trying[0]} {trying[1]}: the worker {ended}; skipped")

    def _keep(self, op: str, shape: Sequence[int], found: Table) -> None:
        for name, configurations in found.items():
            self.table.setdefault(name, {}).update(configurations)
            print(f"{name} {configurations}", flush=True)
        self.table.setdefault(DONE, {})[f"{op} {_name(shape)}"] = {}
        write_table(self.path, self.table)


@contextlib.contextmanager
def _started(order: dict[str, object]) -> Iterator[subprocess.Popen[str]]:
    """Start a worker with its input; kill it at the end of the block."""
    worker = subprocess.Popen(WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        with contextlib.suppress(BrokenPipeError):
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(order))
            worker.stdin.close()
        yield worker
    finally:
        worker.kill()
        worker.wait()


def _lines(worker: subprocess.Popen[str], patience: float, deadline: float) -> Iterator[str]:
    """Lines of a worker until it ends, is silent for `patience` seconds, or reaches the deadline."""
    said: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def listen() -> None:
        for line in worker.stdout or ():
            said.put(line)
        worker.wait()
        said.put(None)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        try:
            line = said.get(timeout=max(min(patience, deadline - time.monotonic()), 0))
        except queue.Empty:
            return
        if line is None:
            return
        yield line


def _name(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _note(text: str) -> None:
    print(f"tune: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune the named ops, or all. Returns the exit code: 2 without a suitable GPU."""
    workloads = load_workloads()
    parser = argparse.ArgumentParser(
        prog="python -m triplane_kernels.tune", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("ops", nargs="*", help=f"of {', '.join(sorted(workloads))}; all without")
    parser.add_argument("--out", type=Path, help="file to write; the package's own for this device without")
    parser.add_argument(
        "--seconds", type=float, default=540, help="time limit in seconds (default: 540); the next run continues"
    )
    parser.add_argument(
        "--patience", type=float, default=90, help="seconds that one configuration may take (default: 90)"
    )
    parser.add_argument("--again", action="store_true", help="search again for configurations that the file has")
    chosen = parser.parse_args(arguments)
    here = machine()
    unknown = set(chosen.ops) - set(workloads)
    if unknown:
        parser.error(f"no op {', '.join(sorted(unknown))}; there are {', '.join(sorted(workloads))}")
    if here.capability is None or here.interpreter or here.triton is None or not here.fp8:
        print(
            f"tune: {here.device} runs no FP8 kernels: it takes a CUDA GPU of compute capability 8.9 or newer and"
            " Triton",
            file=sys.stderr,
        )
        return 2
    path = chosen.out or device_file(here.device)
    table = read_table(path)
    done = () if chosen.again else table.get(DONE, {})
    every = [(op, tuple(shape)) for op in chosen.ops or sorted(workloads) for shape in workloads[op].shapes]
    work = [one for one in every if f"{one[0]} {_name(one[1])}" not in done]
    tuning = Tuning(path, table, work, chosen.patience, time.monotonic() + chosen.seconds)
    tuning.run()
    print(
        f"tune: wrote {path}"
        + (f"; {len(tuning.work)} of {len(every)} workloads are left: run the same again" if tuning.work else "")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
