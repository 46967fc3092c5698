"""Peak memory of the output head at a large vocabulary, as the benchmark `memory` measures it, at a smaller size."""

from __future__ import annotations

import pytest

from benchmarks.memory import MemoryOptions, run
from contracts.errors import TriplaneError


@pytest.mark.slow
def test_large_head_takes_a_tenth_of_the_memory_and_gives_the_same_results() -> None:
    result = run(MemoryOptions(tokens=1024, vocabulary=80_000, width=32, threads=1))
    assert result.metrics["head_peak_percent"] < 10
    assert result.metrics["head_error"] < 1e-5
    plain, _ = result.rows
    assert plain["added GiB"] > 3 * 1024 * 80_000 * 4 / 2**30  # else nothing was measured


def test_benchmark_refuses_a_size_that_the_trainer_does_not_tile() -> None:
    with pytest.raises(TriplaneError, match="up to 256 MiB: raise --tokens or --vocabulary"):
        run(MemoryOptions(tokens=16))
