"""A training to launch, and what launches it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import dagster as dg

from contracts.store import Store
from resources.placement import TrainerPlacement
from resources.trainer_config import LauncherKind

Context = dg.OpExecutionContext | dg.AssetExecutionContext
OnMessage = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Launch:
    """A command to run to its end. It reports through Dagster Pipes."""

    command: Sequence[str]
    nodes: int = 1
    """Machines, each of which runs the command."""
    gpus: int = 0
    """GPUs per machine."""
    timeout_s: float = 86_400.0
    """Maximum run time, in seconds."""
    kind: LauncherKind = "auto"
    """Launcher that the experiment names."""
    key: str = ""
    """Action key of the result. On Kubernetes a second launch of a key continues the first one."""
    experiment: str = ""
    """Name of the experiment."""
    store: Store | None = None
    """Store that keeps the logs of pods."""
    placement: TrainerPlacement = field(default_factory=TrainerPlacement)
    """Resources and nodes of pods."""
    is_done: Callable[[], bool] = lambda: False
    """Whether the result is committed."""


class Launcher(Protocol):
    """Protocol: runs a command to its end."""

    def run(self, context: Context, launch: Launch, on_message: OnMessage) -> list[Mapping[str, Any]]:
        """Run the command; call `on_message` for each message on arrival. Returns all messages.

        Raises LaunchFailed; LaunchKilled if somebody else killed it and it may be launched again.
        """
