"""Forecast of the memory of a training job, before it starts.

    config.json, batch, backend, ranks --> allocations and releases in the order of the code --> Plan: bytes of each
    kind at the peak of each moment, for one rank --> `limits`: does it fit?

Pure functions of numbers; imports no torch. The bytes are those of live tensors: an allocator that keeps freed blocks
may hold more. `benchmarks training-memory` compares the forecast with measured peaks.
"""

from trainer.plan.activations import Batch
from trainer.plan.forecast import Workload, batch_of, plan_training
from trainer.plan.limits import Limit, machine_limits, require_memory
from trainer.plan.tape import Plan

__all__ = ["Batch", "Limit", "Plan", "Workload", "batch_of", "machine_limits", "plan_training", "require_memory"]
