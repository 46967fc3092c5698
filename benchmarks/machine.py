"""Facts about the machine, without which a measurement has no meaning."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from contracts.artifacts import tool_versions


def machine_facts() -> dict[str, Any]:
    """Processor, cores this process may use, memory, load, kernel and tool versions."""
    return {
        "cpu": _from_proc("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _from_proc("/proc/meminfo", "MemTotal"),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "kernel": platform.release(),
        "versions": tool_versions(),
    }


def _from_proc(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
