"""Triplane's side of the `trainer` benchmark: iterations of the same job, one for each line of input.

`python -m benchmarks.trainer_ours FOLDER THREADS`. FOLDER has what `benchmarks.trainer_case` wrote. The line `parts`
measures from then on the seconds by part, which costs a little time.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

from benchmarks.trainer_case import read_case
from benchmarks.trainer_parts import PartClock
from contracts.digests import digest_of
from trainer.config import RlJob
from trainer.metrics import Record
from trainer.run import run_job
from trainer.runtime import keep_freed_memory


def main() -> int:
    """Answer every line with the seconds of one iteration."""
    keep_freed_memory()
    folder, threads = Path(sys.argv[1]), int(sys.argv[2])
    job = RlJob.model_validate(read_case(folder).job).model_copy(update={"threads": threads})
    clock: PartClock | None = None
    _tell({"ready": True})
    for line in sys.stdin:
        if line.strip() == "parts" and clock is None:
            clock = PartClock()
            clock.install()
        key = digest_of(["iteration", uuid4().hex])  # another one each time, since results are found by their keys
        _tell(_iterate(job.model_copy(update={"key": key}), clock))
    return 0


def _iterate(job: RlJob, clock: PartClock | None) -> dict[str, Any]:
    """Run one iteration: read checkpoint, state and dataset; train; publish checkpoint and state.

    `train_seconds` leaves out reading and publishing.
    """
    records: list[Record] = []
    if clock is not None:
        clock.start()
    begin, cpu = time.perf_counter(), time.process_time()
    result = run_job(job, [records.append])
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    assert result is not None
    found = {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "train_seconds": sum(record["seconds"] for record in records),
        "scoring_seconds": records[0]["seconds"],
        "gradient_norm": records[1]["grad_norm"],
        "checkpoint": result.checkpoint.digest,
    }
    return found | ({} if clock is None else {"parts": clock.stop()})


def _tell(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main())
