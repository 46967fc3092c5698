"""Every kernel of `triplane_kernels` on this machine's GPU, beside what the card reaches at all and what torch offers for the same.

On a machine without a CUDA device there is nothing to measure; `--smoke` runs tiny sizes of every case there, under Triton's interpreter where
Triton is installed, to show that the benchmark runs and that results are right.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from benchmarks.kernels_case import REAL, TINY, Case, Sizes, relative_error
from benchmarks.kernels_clock import Clock
from benchmarks.result import NotHereError, Options, Result
from contracts.errors import TriplaneError

MODULES = ("kernels_rows", "kernels_products")
SAME = 0.1
"""Largest relative distance of what computes the same product in another precision."""


class KernelOptions(Options):
    """Options of the `kernels` benchmark."""

    smoke: bool = False
    """Tiny sizes, on the CPU: shows that every case runs and is right; times mean nothing and no goal is judged."""
    repeats: int = Field(30, ge=1, le=10_000)
    """Calls timed for each case; medians count."""


OPTIONS = KernelOptions


def run(options: KernelOptions) -> Result:
    """Measure every case. Raises NotHereError without a CUDA device, unless for a smoke run."""
    if options.smoke:
        return _smoke()
    if not torch.cuda.is_available():
        raise NotHereError(
            "kernels: torch finds no CUDA device here: run `python -m benchmarks kernels --json` on a machine with an NVIDIA GPU "
            "(the goals are an H200's), torch's CUDA build and Triton; `--smoke` shows on any machine that it works"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    clock = Clock(device, options.repeats)
    properties = torch.cuda.get_device_properties(device)
    notes = [
        f"{properties.name}, {properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} GiB; "
        f"CUDA {torch.version.cuda}, torch {torch.__version__}, triton {_triton_version()}"
    ]
    if "H200" not in properties.name:
        notes.append(f"the goals are an H200's; this is {properties.name}: read the shares of its own ceilings")
    return _measure(REAL, clock, notes)


def _smoke() -> Result:
    notes = ["smoke: tiny sizes on the CPU; times and rates mean nothing, and no goal was judged"]
    if importlib.util.find_spec("triton") is not None:
        os.environ["TRITON_INTERPRET"] = "1"
        notes.append(f"Triton {_triton_version()}'s interpreter ran the kernels")
    else:
        notes.append("Triton is not installed: the torch references ran (pip install triton)")
    result = _measure(TINY, Clock(torch.device("cpu"), repeats=1, warmups=0), notes)
    wrong = [f"{row['kernel']} ({row['shape']})" for row in result.rows if not row["right"]]
    if wrong:
        raise TriplaneError(f"kernels: {len(wrong)} of {len(result.rows)} results are wrong: {', '.join(wrong)}")
    return Result({"wrong_results": 0.0}, result.rows, notes, judged=False)


def _triton_version() -> str:
    return importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else "not installed"


def _measure(sizes: Sizes, clock: Clock, notes: list[str]) -> Result:
    torch.manual_seed(0)
    ceilings = clock.ceilings()
    metrics: dict[str, float] = dict(ceilings)
    rows: list[dict[str, Any]] = []
    for case in _cases(sizes, clock.device):
        row, rate = _measure_case(case, clock, ceilings, notes)
        rows.append(row)
        if case.metric is not None:
            metrics[case.metric] = case.counts(rate, metrics.get(case.metric, rate))
    layers = _module("kernels_layers")
    for measured in (layers.loss_head_rows, layers.expert_layer_rows):
        more, found = measured(sizes, clock)
        rows += more
        metrics |= found
    metrics["wrong_results"] = float(sum(not row["right"] for row in rows))
    return Result(metrics, rows, notes)


def _cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    for name in MODULES:
        yield from _module(name).cases(sizes, device)


def _module(name: str) -> ModuleType:
    """Imported late: what imports Triton must find the interpreter switched on or off for good."""
    return importlib.import_module(f"benchmarks.{name}")


def _measure_case(
    case: Case, clock: Clock, ceilings: dict[str, float], notes: list[str]
) -> tuple[dict[str, Any], float]:
    seconds, error = clock.seconds(case.work), case.error()
    rate = case.amount / seconds / 1e12
    ceiling = ceilings.get("copy_tb_per_s" if case.unit == "TB/s" else "bf16_product_tflops")
    beside = []
    for name, peer in case.peers.items():
        try:
            off = _distance(peer(), case.work())
            beside.append(f"{name} {case.amount / clock.seconds(peer) / 1e12:.4g}")
        except (RuntimeError, ValueError, NotImplementedError) as refused:
            reason = str(refused).splitlines()[0][:120]
            notes.append(f"{case.name}, {case.shape}: {name} does not run here: {reason}")
            continue
        if not off <= SAME:
            notes.append(f"{case.name}, {case.shape}: {name} computes something else (relative distance {off:.2g})")
    row = {
        "kernel": case.name, "shape": case.shape, "ms": seconds * 1e3, "rate": f"{rate:.4g} {case.unit}",
        "of ceiling": f"{100 * rate / ceiling:.0f}%" if ceiling else "", "error": error, "right": bool(error <= case.bound), "beside": ", ".join(beside),
    }  # fmt: skip
    return row, rate


def _distance(theirs: object, ours: object) -> float:
    """Relative distance of two results, where both are one tensor of the same shape; 0 where they can't be compared."""
    if not isinstance(theirs, Tensor) or not isinstance(ours, Tensor) or theirs.shape != ours.shape:
        return 0.0
    return relative_error(theirs, ours)
