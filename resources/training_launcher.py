"""Choose what launches trainers: processes of this machine, or pods of a Kubernetes cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import dagster as dg

from contracts.errors import ConfigError
from resources.errors import LaunchFailed
from resources.experiment import Experiment
from resources.launch import Context, Launch, Launcher, OnMessage
from resources.launcher import LocalLauncher, local_refusal
from resources.trainer_config import LauncherKind

LAUNCHER = "TRIPLANE_LAUNCHER"
"""Environment variable with the launcher of experiments whose `trainer.launcher.kind` is auto: local (default) or
kubernetes.
"""


class TrainingLauncher(dg.ConfigurableResource[Any]):
    """Runs trainers with the launcher that the experiment or this deployment names."""

    def run(self, context: Context, launch: Launch, on_message: OnMessage) -> list[Mapping[str, Any]]:
        """See Launcher.run."""
        return launcher_of(launch.kind).run(context, launch, on_message)


def launcher_of(kind: LauncherKind) -> Launcher:
    """The launcher of a kind. Raises ConfigError."""
    if chosen_kind(kind) == "local":
        return LocalLauncher()
    try:
        from resources.kubernetes.launcher import KubernetesLauncher  # needs an extra that local runs do not
    except ImportError as error:
        raise LaunchFailed(
            f"trainer.launcher on kubernetes needs {error.name}: run pip install 'triplane[aws,pods]', or set"
            f" {LAUNCHER} to local"
        ) from None
    return KubernetesLauncher()


def chosen_kind(kind: LauncherKind) -> LauncherKind:
    """`kind`, or for auto that of $TRIPLANE_LAUNCHER. Raises ConfigError."""
    named = os.environ.get(LAUNCHER) or "local"
    if kind != "auto":
        return kind
    if named == "local":
        return "local"
    if named == "kubernetes":
        return "kubernetes"
    raise ConfigError(f"{LAUNCHER}={named}: no such launcher; use local or kubernetes")


def launch_refusal(experiment: Experiment) -> str | None:
    """Why the training of an experiment can't be launched, or None. Raises ConfigError."""
    where = experiment.trainer.launcher
    if chosen_kind(where.kind) == "local":
        return local_refusal(where.nodes, where.gpus)
    if where.nodes > 1 and where.starter != "agent":
        return (
            f"trainer.launcher.starter={where.starter}: starts the processes of one machine only, nodes is"
            f" {where.nodes}; set it to agent"
        )
    return None


def require_launchable(experiment: Experiment) -> None:
    """Raise LaunchFailed if the training of the experiment can't be launched."""
    refusal = launch_refusal(experiment)
    if refusal is not None:
        raise LaunchFailed(f"{experiment.name}: {refusal}")
