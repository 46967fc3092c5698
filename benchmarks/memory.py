"""Peak memory of the trainer's output head, forward and backward, plain and in tiles.

    for each path a process of its own: draw inputs -> resident bytes -> loss, gradients -> peak; results to a file ->
    compare

Peaks count what a path adds to its inputs (hidden states, weight): gradients, logits, copies of them. Linux only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor

import trainer.head
from benchmarks.kernels_case import relative_error
from benchmarks.measure import resident
from benchmarks.result import Options, Result
from contracts.errors import TriplaneError

PATHS = ("plain", "tiled")
GIB = 2**30


class MemoryOptions(Options):
    """Options of the `memory` benchmark."""

    tokens: int = Field(4096, ge=1)
    """Scored tokens."""
    vocabulary: int = Field(151_936, ge=2)
    """Entries of the vocabulary. With few tokens and entries the trainer takes the plain path, which is an error."""
    width: int = Field(1024, ge=1)
    """Size of the hidden states."""
    threads: int = Field(0, ge=0, le=256)
    """Torch threads; 0: one per core."""


OPTIONS = MemoryOptions


def run(options: MemoryOptions) -> Result:
    """Measure both paths, one after the other. Raises TriplaneError if a process dies or the trainer would not tile."""
    if options.tokens * options.vocabulary * 4 <= trainer.head.LARGEST_LOGITS:
        raise TriplaneError(
            f"memory: logits of {options.tokens} x {options.vocabulary} take the plain path, up to"
            f" {trainer.head.LARGEST_LOGITS >> 20} MiB: raise --tokens or --vocabulary"
        )
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as scratch:
        files = {path: Path(scratch) / f"{path}.safetensors" for path in PATHS}
        rows = [_apart(path, options, file) for path, file in files.items()]
        errors = _errors(*files.values())
    plain, tiled = rows
    metrics = {
        "head_peak_percent": 100 * tiled["added GiB"] / plain["added GiB"],
        "head_error": max(errors.values()),
        "head_slowdown": tiled["seconds"] / plain["seconds"],
        **{f"head_error_{name}": error for name, error in errors.items()},
    }
    shape = f"{options.tokens} tokens of {options.width}, vocabulary {options.vocabulary}, float32"
    return Result(
        metrics, rows, [f"{shape}; the weight's gradient is {options.vocabulary * options.width * 4 / GIB:.2f} GiB"]
    )


def _apart(path: str, options: MemoryOptions, file: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.memory", path, options.model_dump_json(), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message; the kernel kills a process for lack of memory"])[-1]
        raise TriplaneError(f"memory: the {path} path ended with status {done.returncode}: {last}")
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def _errors(plain: Path, tiled: Path) -> dict[str, float]:
    """Largest difference of log probabilities and of entropies, relative to the value where it is above 1 nat; norm of
    the difference of each gradient, relative.
    """
    wanted, found = load_file(plain), load_file(tiled)
    return {name: _error(found[name], right) for name, right in wanted.items()}


def _error(found: Tensor, wanted: Tensor) -> float:
    if wanted.dim() == 1:
        return float(((found - wanted).abs() / wanted.abs().clamp(min=1)).max())
    return relative_error(found, wanted)


def measure(path: Literal["plain", "tiled"], options: MemoryOptions, file: Path) -> dict[str, Any]:
    """Compute one path's loss and gradients in this process. Returns its row and writes the results to `file`."""
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, options.width, generator=draw).requires_grad_()
    weight = torch.randn(options.vocabulary, options.width, generator=draw).mul_(options.width**-0.5).requires_grad_()
    targets = torch.randint(options.vocabulary, (options.tokens,), generator=draw)
    advantages = torch.randn(options.tokens, generator=draw)
    for limit in (-1, 2**60):  # imports and thread pools of both paths
        trainer.head.LARGEST_LOGITS = limit
        trainer.head.target_scores(torch.zeros(2, 2), torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64), 1.0)
    trainer.head.LARGEST_LOGITS = 2**60 if path == "plain" else 0
    before, begin = resident("VmRSS"), time.perf_counter()
    logprobs, entropy = trainer.head.target_scores(hidden, weight, targets, 1.0)
    (-(logprobs * advantages).mean()).backward()  # type: ignore[no-untyped-call]
    seconds, peak = time.perf_counter() - begin, resident("VmHWM")
    assert hidden.grad is not None and weight.grad is not None
    results = {"logprobs": logprobs.detach(), "entropy": entropy, "of_hidden": hidden.grad, "of_weight": weight.grad}
    save_file(results, file)
    return {
        "path": path,
        "added GiB": (peak - before) / GIB,
        "inputs GiB": before / GIB,
        "process GiB": peak / GIB,
        "seconds": seconds,
    }


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], MemoryOptions.model_validate_json(sys.argv[2]), Path(sys.argv[3]))))  # type: ignore[arg-type]
