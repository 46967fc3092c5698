"""The values that cross the environment plane's API, on both of its sides. Imports no grpc."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

TestStatus = Literal["passed", "failed", "error", "skipped", "missing"]
VerifyExit = Literal["completed", "crashed", "timed_out", "apply_failed"]


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use."""

    memory_mb: int = 512
    """All its processes and files together, in MiB."""
    pids: int = 64
    """Processes and threads alive at once."""
    cpu: float = 1.0
    """Cores."""
    disk_mb: int = 64
    """Everything it writes, workspace and /tmp together, in MiB."""
    lifetime_s: float = 600
    """Seconds after which it is destroyed, whoever forgot it."""


@dataclass(frozen=True)
class ToolCall:
    """One tool call: a name from `envd.tools.TOOLS` and arguments for its schema."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class ToolResult:
    """What a tool answered. `text` is what a policy sees; it never holds a time, a pid or a host path."""

    ok: bool
    text: str
    true_bytes: int
    """Size of the whole output, before it was cut."""
    truncated: bool = False
    timed_out: bool = False
    seconds: float = field(default=0.0, compare=False)
    """Telemetry only."""


@dataclass(frozen=True)
class TestOutcome:
    """How one requested test ended. `missing`: it never reported."""

    __test__ = False
    name: str
    status: TestStatus
    message: str = ""


@dataclass(frozen=True)
class VerifyResult:
    """The verdict's raw material: one outcome a requested test, in request order."""

    outcomes: tuple[TestOutcome, ...]
    exit: VerifyExit
    log: str
    seconds: float = field(default=0.0, compare=False)
    """Telemetry only."""


@dataclass(frozen=True)
class ServerInfo:
    """What a server is."""

    backend: str
    isolation: bool
    """False when the code in a sandbox can reach the host."""
    version: str
    live: int
    """Sandboxes that exist now."""
    limits_enforced: tuple[str, ...]
    """Which of memory, pids, cpu, disk the backend really enforces here."""
