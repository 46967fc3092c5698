"""Memory that this process may use, and the refusal of a job that needs more.

Sources of limits: MemAvailable and SwapFree of /proc/meminfo, the control groups above the process (v1 and v2),
RLIMIT_AS and RLIMIT_DATA. Systems without them have no limit here.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import TrainingMemoryError
from trainer.plan.tape import Plan

SHOWN = 4
TOLERANCE = 0.9
"""Share of a forecast that must fit: one that is a little too high never refuses a job that runs."""
_UNLIMITED = 1 << 60
"""cgroup v1 writes about 2^63 for no limit."""


@dataclass(frozen=True)
class Limit:
    """Memory that is still free under one limit."""

    name: str
    free: int
    """Bytes."""
    shared: bool = True
    """Whether all ranks of this machine share it."""


def machine_limits(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> list[Limit]:
    """Limits of this process, the tightest first. proc, groups: where the kernel shows them."""
    found = [*_meminfo(proc), *_cgroups(proc, groups), *_rlimits(proc)]
    return sorted(found, key=lambda limit: limit.free)


def require_memory(plan: Plan, advice: str, local_ranks: int = 1, limits: list[Limit] | None = None) -> None:
    """Raise TrainingMemoryError if a job that has not allocated yet can't fit. advice: what the user may change.

    local_ranks: ranks on this machine. limits: default: those of this process.
    """
    for limit in machine_limits() if limits is None else limits:
        count = local_ranks if limit.shared else 1
        if plan.peak * count * TOLERANCE > limit.free:
            raise TrainingMemoryError(_refusal(plan, limit, count, advice))


def _refusal(plan: Plan, limit: Limit, count: int, advice: str) -> str:
    biggest = ", ".join(f"{kind} {in_units(size)}" for kind, size in plan.biggest[:SHOWN])
    each = f"{count} ranks of {in_units(plan.peak)}" if count > 1 else in_units(plan.peak)
    return (
        f"training needs {each} of memory (while it is in {plan.moment}: {biggest}), but {limit.name} leaves"
        f" {in_units(limit.free)}: {advice}; `triplane plan` prints the whole plan"
    )


def in_units(size: float) -> str:
    """Bytes for people, in powers of 1000, e.g. 1.53 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB" if size < 1000 else f"{size:,.0f} TB"


def _meminfo(proc: Path) -> Iterator[Limit]:
    found = _numbers(proc / "meminfo")
    if "MemAvailable" in found:
        yield Limit("this machine", 1024 * (found["MemAvailable"] + found.get("SwapFree", 0)))


def _numbers(path: Path) -> dict[str, int]:
    """Numbers of lines such as `Name:  12 kB`."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _cgroups(proc: Path, groups: Path) -> Iterator[Limit]:
    """The process's control group and those above it."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (
            (groups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"))
            if controllers
            else (groups, ("memory.max", "memory.current"))
        )
        below = root / path.lstrip("/")
        for folder in dict.fromkeys([below, *below.parents]):
            if folder.is_relative_to(root):
                yield from _cgroup(folder, *names)


def _cgroup(folder: Path, limit: str, usage: str) -> Iterator[Limit]:
    try:
        most, used = (int((folder / name).read_text()) for name in (limit, usage))
    except (OSError, ValueError):  # no such controller here, or "max"
        return
    if most < _UNLIMITED:
        kept = _numbers(folder / "memory.stat")
        cache = kept.get("total_inactive_file", kept.get("inactive_file", 0))
        yield Limit(f"the control group {folder}", max(0, most - used + cache))


def _rlimits(proc: Path) -> Iterator[Limit]:
    held = _numbers(proc / "self" / "status")
    for name, code, now in (
        ("RLIMIT_AS", resource.RLIMIT_AS, "VmSize"),
        ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData"),
    ):
        most, _ = resource.getrlimit(code)
        if most != resource.RLIM_INFINITY:
            yield Limit(f"{name} (ulimit)", max(0, most - 1024 * held.get(now, 0)), shared=False)
