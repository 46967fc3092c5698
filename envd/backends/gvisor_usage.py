"""What a gVisor sandbox uses, from its control groups: its processes on the host are its kernel's, whatever runs inside."""

from __future__ import annotations

from pathlib import Path

from envd.backends.base import Usage
from envd.sandbox.cgroups import box_groups


def usage_of(groups: str, box: str) -> Usage:
    """Memory with the sandbox's kernel, time of all its cores, and how often memory ran out. 0 for what no group tells."""
    found = box_groups(groups, box)
    return Usage(
        memory_bytes=_number(found, "memory", "memory.usage_in_bytes") or _number(found, "unified", "memory.current"),
        cpu_s=_field(found, "unified", "cpu.stat", "usage_usec") / 1e6,
        events={
            "memory": _field(found, "memory", "memory.oom_control", "oom_kill")
            or _field(found, "unified", "memory.events", "oom_kill"),
            "pids": _field(found, "pids", "pids.events", "max") or _field(found, "unified", "pids.events", "max"),
        },
    )


def _text(found: dict[str, Path], controller: str, name: str) -> str:
    path = found.get(controller)
    try:
        return (path / name).read_text() if path is not None else ""
    except OSError:
        return ""


def _number(found: dict[str, Path], controller: str, name: str) -> int:
    return int(_text(found, controller, name) or 0)


def _field(found: dict[str, Path], controller: str, name: str, key: str) -> int:
    for line in _text(found, controller, name).splitlines():
        words = line.split()
        if words[0] == key:
            return int(words[1])
    return 0
