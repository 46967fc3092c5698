"""Launch configurations of the kernels: stored as data for known devices, found by search and cached for others.

    lookup(op, shape) --> tuned/<device>.json, nearest shape --> user's cache, same shape bucket --> search (do_bench),
    into the cache

`python -m triplane_kernels.tune` searches every op's workloads and writes the file for this device.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from triplane_kernels.errors import KernelError
from triplane_kernels.machine import machine

Config = dict[str, int]
"""A kernel's compile-time parameters (BLOCK_*, and so on) with `num_warps` and `num_stages`."""
Table = dict[str, dict[str, Config]]
"""op -> shape bucket ("4096x8192") -> configuration."""
Shape = tuple[int, ...]
Results = Tensor | Sequence[Tensor] | None
"""Output of a launch, compared between configurations if it is given."""
TUNED = Path(__file__).parent / "tuned"
CACHE = "TRIPLANE_KERNELS_CACHE"
"""Environment variable with the folder for configurations found by search; default:
$XDG_CACHE_HOME/triplane/kernels.
"""
SAMPLE = 1 << 18
"""Number of values of a result that are compared between configurations."""
SAMPLED_ROWS = 64
DISTANCE = 0.01
"""Largest relative distance of agreeing results."""
_log = logging.getLogger(__name__)
_remembered: dict[tuple[str, str, str], Config] = {}
_recorder: list[Recorder] = []


@dataclass(frozen=True)
class Recorder:
    """State of a search at every lookup."""

    table: Table
    skipped: Sequence[tuple[str, Config]]
    """Configurations to skip, since they crashed a process before."""
    announce: Callable[[str, Config], None]
    """Called with each configuration before it is compiled and launched."""

    def search(self, op: str, candidates: Sequence[Config], run: Callable[[Config], Results]) -> Config:
        """`search` without the skipped configurations."""
        announced: list[Config] = []

        def told(config: Config) -> Results:
            if config not in announced:
                announced.append(config)
                self.announce(op, config)
            return run(config)

        return search(op, [one for one in candidates if (op, one) not in self.skipped], told)


@dataclass(frozen=True)
class Workload:
    """Shapes to tune an op for, and a function that runs it once."""

    shapes: Sequence[Shape]
    run: Callable[..., object]
    """Called with a shape's numbers; calls the public op on fresh CUDA tensors."""


WORKLOADS: dict[str, Workload] = {}


def workload(op: str, shapes: Sequence[Shape]) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Register the decorated function as the workload of `op` for `python -m triplane_kernels.tune`, called once per
    shape.
    """

    def register(run: Callable[..., object]) -> Callable[..., object]:
        WORKLOADS[op] = Workload(shapes, run)
        return run

    return register


def bucket(shape: Sequence[int]) -> str:
    """Each size rounded to the nearest power of two (0 stays 0): "4096x8192" for (4000, 7168)."""
    return "x".join(str(2 ** round(math.log2(size)) if size > 0 else 0) for size in shape)


def lookup(
    op: str, shape: Sequence[int], candidates: Sequence[Config], run: Callable[[Config], Results], *, small: Config
) -> Config:
    """Configuration for a launch of `op` with `shape`.

    candidates: configurations for a search, the best guess first. run: launches the kernel once with a configuration,
    returns its output (the same tensors at every call) or None, and may be repeated. small: configuration for the
    interpreter, where large tiles take long. A candidate that the device refuses (registers, shared memory) is skipped;
    KernelError if it refuses all. During capture of a CUDA graph there is no search, and the first candidate is used.
    """
    here = machine()
    if here.interpreter:
        return small
    key = (here.device, op, bucket(shape))
    if _recorder:
        table = _recorder[-1].table.setdefault(op, {})
        if key[2] not in table:
            table[key[2]] = _recorder[-1].search(op, candidates, run)
        return table[key[2]]
    if key in _remembered:
        return _remembered[key]
    found = nearest(_packaged(here.device).get(op, {}), shape) or read_table(_cache_file()).get(op, {}).get(key[2])
    if found is None:
        if torch.cuda.is_current_stream_capturing():
            return candidates[0]
        try:
            found = search(op, candidates, run)
        except torch.OutOfMemoryError:
            _log.warning("%s: not enough memory to time configurations; using the first one for now", op)
            return candidates[0]
        _keep(op, key[2], found)
    _remembered[key] = found
    return found


def nearest(table: Mapping[str, Config], shape: Sequence[int]) -> Config | None:
    """Configuration whose bucket is nearest to `shape`, by the sum of |log2| differences; None for an empty table."""

    def distance(name: str) -> float:
        sizes = [int(part) for part in name.split("x")]
        return sum(abs(math.log2(max(size, 1)) - math.log2(max(at, 1))) for size, at in zip(shape, sizes, strict=True))

    return table[min(table, key=distance)] if table else None


@dataclass(frozen=True)
class _Trial:
    config: Config
    milliseconds: float
    sample: Sequence[Tensor]


def search(op: str, candidates: Sequence[Config], run: Callable[[Config], Results]) -> Config:
    """Fastest of `candidates` by the median of CUDA event times, among those with the most frequent result.

    Skips candidates that the device refuses (registers, shared memory). Raises KernelError if none runs or one breaks
    the CUDA context, torch.OutOfMemoryError if results can't be compared or timed.
    """
    trials: list[_Trial] = []
    refusal = ""
    for candidate in candidates:
        try:
            trials.append(_try(candidate, run))
        except torch.OutOfMemoryError:
            raise
        except Exception as refused:  # noqa: BLE001  Triton's compiler and launcher raise many types for what a device lacks
            refusal = f"{type(refused).__name__}: {(str(refused).splitlines() or [''])[0]}"
            _log.info("%s: skipping %s: %s", op, candidate, refusal)
            _check_context(op, candidate, refused)
    if not trials:
        raise KernelError(
            f"{op}: none of {len(candidates)} configurations runs on {machine().device} ({refusal}); set"
            " TRIPLANE_KERNELS=reference"
        )
    groups = [[other for other in trials if agree(one.sample, other.sample)] for one in trials]
    agreed = max(groups, key=len)
    for trial in trials:
        if trial not in agreed:
            _log.warning(
                "%s: skipping %s, whose results differ from %d agreeing configurations",
                op,
                trial.config,
                len(agreed),
            )
    return dict(min(agreed, key=lambda trial: trial.milliseconds).config)


def _try(candidate: Config, run: Callable[[Config], Results]) -> _Trial:
    from triton.testing import do_bench

    # before the second launch, fill the output with values that no kernel writes, to detect unwritten ones
    for written in _tensors(run(candidate)):
        written.fill_(math.nan if written.is_floating_point() else torch.iinfo(written.dtype).max)
    sample = [_sample(written) for written in _tensors(run(candidate))]
    return _Trial(candidate, do_bench(lambda: run(candidate), warmup=10, rep=40, return_mode="median"), sample)


def _tensors(results: Results) -> Sequence[Tensor]:
    return () if results is None else (results,) if isinstance(results, Tensor) else results


def _sample(written: Tensor) -> Tensor:
    """Small float32 copy of evenly spread values: about SAMPLE of them, or some rows of a non-contiguous tensor."""
    if written.is_contiguous():
        spread = written.detach().flatten()[:: max(written.numel() // SAMPLE, 1)]
    else:
        spread = written.detach()[:: max(written.shape[0] // SAMPLED_ROWS, 1)].flatten()
    return spread.to(torch.float32, copy=True)


def agree(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether results differ by no more than the order of summation allows: 1% in norm, NaN and infinity in the same
    places.
    """
    for one, other in zip(ours, theirs, strict=True):
        same = (one == other) | (one.isnan() & other.isnan())
        distance = torch.where(same, 0, one - other).norm()
        # not (a > b), so that NaN disagrees
        if not distance <= DISTANCE * torch.where(other.isfinite(), other, 0).norm():
            return False
    return True


def _check_context(op: str, candidate: Config, refused: Exception) -> None:
    """Raise KernelError if the error broke the CUDA context: after an illegal access all later calls of this process
    fail.
    """
    try:
        torch.cuda.synchronize()
    except Exception as lost:  # noqa: BLE001  torch raises several types
        raise KernelError(
            f"{op}: {candidate} broke the CUDA context ({(str(lost).splitlines() or [''])[0]}); start this process"
            " again with TRIPLANE_KERNELS=reference"
        ) from refused


@contextlib.contextmanager
def searching(
    skipped: Sequence[tuple[str, Config]] = (), announce: Callable[[str, Config], None] = lambda op, config: None
) -> Iterator[Table]:
    """Context in which every lookup searches, regardless of stored configurations; yields the table of results.

    Arguments: fields of `Recorder`.
    """
    recorder = Recorder({}, skipped, announce)
    _recorder.append(recorder)
    try:
        yield recorder.table
    finally:
        _recorder.remove(recorder)


def tuning_now() -> bool:
    """Whether `searching` is active: only then are kernels that could hang a device candidates, since `tune` kills a
    hanging process.
    """
    return bool(_recorder)


def write_table(path: Path, table: Table) -> None:
    """Write `table` as JSON, atomically: readers see the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(handle, "w") as file:
        json.dump(table, file, indent=1, sort_keys=True)
        file.write("\n")
    Path(name).replace(path)


def device_file(device: str) -> Path:
    """The package's file of configurations for the device of this name."""
    return TUNED / f"{_slug(device)}.json"


@cache
def source_digest() -> str:
    """Digest of all kernel sources: configurations of other sources are ignored."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem.endswith(("_triton", "_gluon")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _packaged(device: str) -> Table:
    return read_table(device_file(device))


def read_table(path: Path) -> Table:
    """Table in `path`; empty if it is missing or unreadable (a search then writes it again)."""
    try:
        table = json.loads(path.read_text())
        if not isinstance(table, dict):
            raise ValueError("no JSON object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _log.warning("%s: not a table of kernel configurations (%s); searching configurations again", path, error)
        return {}
    return table


def _keep(op: str, name: str, found: Config) -> None:
    path = _cache_file()
    table = read_table(path)
    table.setdefault(op, {})[name] = found
    try:
        write_table(path, table)
    except OSError as error:
        _log.warning("%s: can't store a kernel configuration (%s); set %s to a writable folder", path, error, CACHE)


def _cache_file() -> Path:
    here = machine()
    chosen, base = os.environ.get(CACHE), os.environ.get("XDG_CACHE_HOME")
    # a process whose user has no entry has no home
    folder = Path(chosen) if chosen else (Path(base) if base else Path.home() / ".cache") / "triplane" / "kernels"
    return folder / f"{_slug(here.device)}-triton-{here.triton}-{source_digest()}.json"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
