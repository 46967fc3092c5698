"""Launch configurations of the kernels: kept as data for known devices, found by search and remembered for others.

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
"""What a launch wrote: compared between configurations where it is given."""
TUNED = Path(__file__).parent / "tuned"
CACHE = "TRIPLANE_KERNELS_CACHE"
"""Environment variable naming the folder for configurations found by search; $XDG_CACHE_HOME/triplane/kernels without
it.
"""
SAMPLE = 1 << 18
"""Values of a result that are compared between configurations."""
SAMPLED_ROWS = 64
DISTANCE = 0.01
"""Largest relative distance of results that agree."""
_log = logging.getLogger(__name__)
_remembered: dict[tuple[str, str, str], Config] = {}
_recorder: list[Recorder] = []


@dataclass(frozen=True)
class Recorder:
    """What a search at every lookup fills and heeds."""

    table: Table
    skipped: Sequence[tuple[str, Config]]
    """Configurations of an op that are not tried: they brought a process down before."""
    announce: Callable[[str, Config], None]
    """Told each configuration before it is compiled and launched."""

    def search(self, op: str, candidates: Sequence[Config], run: Callable[[Config], Results]) -> Config:
        """`search` among those that are not skipped."""
        announced: list[Config] = []

        def told(config: Config) -> Results:
            if config not in announced:
                announced.append(config)
                self.announce(op, config)
            return run(config)

        return search(op, [one for one in candidates if (op, one) not in self.skipped], told)


@dataclass(frozen=True)
class Workload:
    """Shapes worth tuning an op for, and how to run it once at each of them."""

    shapes: Sequence[Shape]
    run: Callable[..., object]
    """Called with a shape's numbers; calls the public op on fresh CUDA tensors."""


WORKLOADS: dict[str, Workload] = {}


def workload(op: str, shapes: Sequence[Shape]) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Register the decorated function as what `python -m triplane_kernels.tune` runs for `op`, once a shape."""

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
    """The configuration to launch `op` with at `shape`.

    candidates: what a search tries, the best guess first. run: launches the kernel once with a configuration, returns
    what it wrote (the same tensors at every call) or None, and may be repeated. small: what the interpreter takes,
    where sizes cost time. A candidate that the device refuses (registers, shared memory) is passed over; KernelError
    where it refuses all. While a CUDA graph is captured nothing is searched: the first guess is taken.
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
            _log.warning("%s: no memory is left to time configurations; the first is taken until there is", op)
            return candidates[0]
        _keep(op, key[2], found)
    _remembered[key] = found
    return found


def nearest(table: Mapping[str, Config], shape: Sequence[int]) -> Config | None:
    """The configuration whose bucket lies nearest to `shape`, by the sum of |log2| differences; None in an empty
    table.
    """

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
    """The fastest of `candidates` by the median of CUDA event times, among those whose results most of them share.

    What the device refuses (registers, shared memory) is passed over. Raises KernelError where none runs and where one
    breaks the CUDA context, torch.OutOfMemoryError where results can't be compared or timed.
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
            _log.info("%s: %s is passed over: %s", op, candidate, refusal)
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
                "%s: %s gives other results than %d configurations that agree; it is passed over",
                op,
                trial.config,
                len(agreed),
            )
    return dict(min(agreed, key=lambda trial: trial.milliseconds).config)


def _try(candidate: Config, run: Callable[[Config], Results]) -> _Trial:
    from triton.testing import do_bench

    # the second launch writes over values that no kernel writes, so what it leaves out is seen
    for written in _tensors(run(candidate)):
        written.fill_(math.nan if written.is_floating_point() else torch.iinfo(written.dtype).max)
    sample = [_sample(written) for written in _tensors(run(candidate))]
    return _Trial(candidate, do_bench(lambda: run(candidate), warmup=10, rep=40, return_mode="median"), sample)


def _tensors(results: Results) -> Sequence[Tensor]:
    return () if results is None else (results,) if isinstance(results, Tensor) else results


def _sample(written: Tensor) -> Tensor:
    """A copy of some evenly spread values, float32, that takes little memory: about SAMPLE of them, or some rows of
    what is not contiguous.
    """
    if written.is_contiguous():
        spread = written.detach().flatten()[:: max(written.numel() // SAMPLE, 1)]
    else:
        spread = written.detach()[:: max(written.shape[0] // SAMPLED_ROWS, 1)].flatten()
    return spread.to(torch.float32, copy=True)


def agree(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether results differ by no more than the order of a sum can make: 1% in norm, NaN and infinity in the same
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
    """Raises KernelError where the error was no refusal: after an illegal access every later call of this process
    fails.
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
    """Inside, every lookup searches anew, whatever is kept; yields the table that fills.

    Arguments: fields of `Recorder`.
    """
    recorder = Recorder({}, skipped, announce)
    _recorder.append(recorder)
    try:
        yield recorder.table
    finally:
        _recorder.remove(recorder)


def tuning_now() -> bool:
    """Inside `searching`: kernels that could hang a device are candidates there alone, where a process that hangs is
    ended.
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
    """Where the package keeps the configurations of the device of this name."""
    return TUNED / f"{_slug(device)}.json"


@cache
def source_digest() -> str:
    """Digest of every kernel's source: configurations found for another source are not taken."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem.endswith(("_triton", "_gluon")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _packaged(device: str) -> Table:
    return read_table(device_file(device))


def read_table(path: Path) -> Table:
    """The table in `path`; empty where there is none or it can't be read as one (a search then writes it anew)."""
    try:
        table = json.loads(path.read_text())
        if not isinstance(table, dict):
            raise ValueError("no JSON object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _log.warning("%s: not a table of kernel configurations (%s); configurations are searched anew", path, error)
        return {}
    return table


def _keep(op: str, name: str, found: Config) -> None:
    path = _cache_file()
    table = read_table(path)
    table.setdefault(op, {})[name] = found
    try:
        write_table(path, table)
    except OSError as error:
        _log.warning("%s: can't keep a kernel configuration (%s); set %s to a writable folder", path, error, CACHE)


def _cache_file() -> Path:
    here = machine()
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get(CACHE) or base / "triplane" / "kernels")
    return folder / f"{_slug(here.device)}-triton-{here.triton}-{source_digest()}.json"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
