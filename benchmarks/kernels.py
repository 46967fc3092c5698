"""Every kernel of `triplane_kernels` on this machine's GPU, compared with the card's ceilings and torch's equivalents.

    parts (quantizers, ..., expert layer) --each in a process of its own--> a row a case, as it is measured --> metrics

A part that crashes, hangs or runs out of time becomes a note; the others are still measured. Without a CUDA device
there is nothing to measure; `--smoke` then runs tiny sizes of every case, under Triton's interpreter if Triton is
installed, to show that the benchmark runs correctly.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from benchmarks.kernels_case import TINY, Measured
from benchmarks.kernels_clock import Clock
from benchmarks.kernels_parts import PARTS, chosen_parts, measure
from benchmarks.kernels_process import Lost, measured_apart
from benchmarks.result import NotHereError, Options, Result
from contracts.errors import TriplaneError


class KernelOptions(Options):
    """Options of the `kernels` benchmark."""

    smoke: bool = False
    """Run tiny sizes on the CPU, to show that every case is correct. Times have no meaning; goals are not judged."""
    repeats: int = Field(30, ge=1, le=10_000)
    """Timed calls per case; results are medians."""
    only: str = ""
    """Parts to measure, as comma-separated pieces of their names; goals are then not judged. Empty: all parts."""
    seconds: float = Field(540, gt=0)
    """Total time limit, in seconds. Remaining parts become notes; measure them with `--only`."""
    patience: float = Field(150, gt=0)
    """Time limit of one case, including compilation and search, in seconds."""
    rows: Path | None = None
    """File to which each measured row is appended, as one JSON object per line."""


OPTIONS = KernelOptions


def run(options: KernelOptions) -> Result:
    """Measure every part.

    Raises NotHereError without a CUDA device, except for a smoke run, and ConfigError if `only` names no part.
    """
    parts = chosen_parts(options.only)
    if options.smoke:
        return _smoke(parts, options)
    if not torch.cuda.is_available():
        raise NotHereError(
            "kernels: torch finds no CUDA device here: run `python -m benchmarks kernels --json` on a machine with an"
            " NVIDIA GPU (the goals are an H200's), torch's CUDA build and Triton; `--smoke` shows on any machine that"
            " it works"
        )
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    notes = [
        f"{properties.name}, {properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f}"
        f" GiB; CUDA {torch.version.cuda}, torch {torch.__version__}, triton {_triton_version()}"
    ]
    if "H200" not in properties.name:
        notes.append(f"the goals are an H200's; this is {properties.name}: read the shares of its own ceilings")
    return _collected(_apart(parts, options, notes), notes, options, judged=len(parts) == len(PARTS))


def _smoke(parts: list[str], options: KernelOptions) -> Result:
    notes = ["smoke: tiny sizes on the CPU; times and rates have no meaning, and no goal was judged"]
    if importlib.util.find_spec("triton") is not None:
        os.environ["TRITON_INTERPRET"] = "1"
        notes.append(f"Triton {_triton_version()}'s interpreter ran the kernels")
    else:
        notes.append("Triton is not installed: the torch references ran (pip install triton)")
    clock = Clock(torch.device("cpu"), repeats=1, warmups=0)
    here = (found for part in parts for found in measure(part, TINY, clock, {}))
    result = _collected(here, notes, options, judged=False)
    wrong = [f"{row['kernel']} ({row['shape']})" for row in result.rows if not row["right"]]
    if wrong:
        raise TriplaneError(f"kernels: {len(wrong)} of {len(result.rows)} results are wrong: {', '.join(wrong)}")
    return Result({"wrong_results": 0.0}, result.rows, result.notes, judged=False)


def _apart(parts: list[str], options: KernelOptions, notes: list[str]) -> Iterator[Measured]:
    """Measurements of all parts, each in a separate process; lost ones become notes."""
    deadline = time.monotonic() + options.seconds
    ceilings: dict[str, float] = {}
    for place, part in enumerate(["ceilings", *parts]):
        if time.monotonic() >= deadline:
            left = parts[max(place - 1, 0) :]
            notes.append(
                f"{options.seconds:g} seconds were over: not measured: {', '.join(left)}; --only measures them"
            )
            return
        try:
            for found in measured_apart(part, options.repeats, ceilings, options.patience, deadline):
                ceilings |= found.metrics if part == "ceilings" else {}
                yield found
        except Lost as lost:
            notes.append(f"{part}: {lost}")


def _collected(found: Iterator[Measured], notes: list[str], options: KernelOptions, *, judged: bool) -> Result:
    """Combine all measurements into one result. Rows are printed on standard error and appended to the file as they
    arrive.
    """
    metrics: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for one in found:
        notes += one.notes
        for name, value in one.metrics.items():
            metrics[name] = one.counts(value, metrics[name]) if name in metrics else value
        if one.row is None:
            continue
        rows.append(_finite(one.row))
        line = json.dumps(rows[-1])
        if not options.smoke:
            print(line, file=sys.stderr, flush=True)
        if options.rows is not None:
            with options.rows.open("a") as file:
                file.write(line + "\n")
    metrics["wrong_results"] = float(sum(not row["right"] for row in rows))
    return Result(metrics, rows, notes, judged)


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Row for JSON, with NaN and infinity as text."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def _triton_version() -> str:
    return importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "not installed"
