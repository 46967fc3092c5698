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
class Observation:
    """What a hidden test without expectations saw at one assertion (envd/sandbox/observing.py)."""

    test: str
    """Node id of the test that ran."""
    key: str
    """The assertion."""
    value: str
    """JSON of the compared values, encoded by exact builtin types. The code under test may have written it: compare,
    never trust.
    """


@dataclass(frozen=True)
class VerifyResult:
    """The verdict's raw material: one outcome a requested test, in request order."""

    outcomes: tuple[TestOutcome, ...]
    exit: VerifyExit
    log: str
    seconds: float = field(default=0.0, compare=False)
    """Telemetry only."""
    tampering: tuple[str, ...] = field(default=(), compare=False)
    """What the final state did to its own verdict, as kind:detail (docs/threat-model.md); empty for nearly all. Beside
    the outcomes, no part of them.
    """
    backend: str = field(default="", compare=False)
    """What the tests ran on; plain isolates nothing."""
    observations: tuple[Observation, ...] = field(default=(), compare=False)
    """In the order in which they were reported; none where the hidden tests are run as written."""


@dataclass(frozen=True)
class Export:
    """What may leave a sandbox in its diff (docs/sandboxes.md, "What leaves a sandbox")."""

    artifacts: tuple[str, ...] = ()
    """Patterns of the paths that are wanted, as in `.gitignore`; with one, no link leaves.

    None: everything may leave.
    """
    max_files: int = 1000
    """Changed files, in the order of their paths; 0: unbounded."""
    max_bytes: int = 16 * 1024 * 1024
    """Of their new contents together; 0: unbounded."""


@dataclass(frozen=True)
class LeftOut:
    """What an export left out of a diff."""

    counts: Mapping[str, int] = field(default_factory=dict)
    """By reason: undeclared, link, count, size. Undeclared are also files that were touched and hold what they held."""
    paths: tuple[tuple[str, str], ...] = ()
    """The first 64, each with its reason, the undeclared last."""


@dataclass(frozen=True)
class Handle:
    """What a client needs to use a sandbox again: whoever has it may."""

    id: str
    token: str = field(repr=False)


@dataclass(frozen=True)
class SandboxStatus:
    """A sandbox as its server sees it."""

    id: str
    state: Literal["running", "paused", "hibernated"]
    backend: str
    template: str
    age_s: float
    expires_in_s: float
    memory_bytes: int
    """Now; 0 where the backend can't tell."""
    pids: int
    cpu_s: float
    """Used since its start."""
    labels: Mapping[str, str]
    host_name: str
    lost: tuple[str, ...] = ()
    """What the last hibernation, fork or move could not keep, e.g. processes."""
