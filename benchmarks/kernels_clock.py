"""Timing on a CUDA device by CUDA events, with a cold cache; on a CPU by the clock."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.kernels_case import Work
from benchmarks.measure import median, seconds_of

FLUSH_BYTES = 1 << 30
"""Bytes written before each call: several times the L2 cache of any GPU, to evict all inputs."""
COPY_BYTES = 4 << 30
PRODUCT = 8192


@dataclass(frozen=True)
class Clock:
    """Medians of `repeats` calls after `warmups` calls, which include compilation and the search for configurations."""

    device: torch.device
    repeats: int
    warmups: int = 3

    def seconds(self, work: Work) -> float:
        """Median seconds of one call."""
        if self.device.type != "cuda":
            return median(seconds_of(work, repeats=1, warmups=0))
        for _ in range(self.warmups):
            work()
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        pairs = []
        for _ in range(self.repeats):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            # The flush takes a quarter of a millisecond, in which the host queues the call, so launching is not
            # measured.
            flush.zero_()
            begin.record()
            work()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize(self.device)
        return median([begin.elapsed_time(end) / 1e3 for begin, end in pairs])

    def peak_bytes(self, work: Work) -> int:
        """Device memory that one call allocates, in bytes; 0 on a CPU."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def ceilings(self) -> dict[str, float]:
        """Ceilings of this device: bytes per second of a large copy (read and written), FLOP/s of a large bfloat16
        product; empty for a CPU.
        """
        if self.device.type != "cuda":
            return {}
        return {"copy_tb_per_s": self._copy() / 1e12, "bf16_product_tflops": self._product() / 1e12}

    def _copy(self) -> float:
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self.device).random_()
        target = torch.empty_like(source)
        return 2 * COPY_BYTES / self.seconds(lambda: target.copy_(source))

    def _product(self) -> float:
        left, right = (torch.randn(PRODUCT, PRODUCT, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * PRODUCT**3 / self.seconds(lambda: left @ right)
