"""The experiment's training of one iteration, and the processes and machines on which it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from trainer.config import BackendConfig, Device, RlConfig
from trainer.watchers import WatchConfig, WatchedRun

LauncherKind = Literal["auto", "local", "kubernetes"]


class LauncherConfig(BackendConfig):
    """Where training runs."""

    kind: LauncherKind = "auto"
    """local: processes of this machine. kubernetes: pods of a cluster, one for each machine. auto: what
    $TRIPLANE_LAUNCHER of the deployment names, else local.
    """
    nodes: int = Field(default=1, ge=1, le=1024)
    """Number of machines; more than one needs kubernetes."""
    gpus: int = Field(default=0, ge=0, le=64)
    """GPUs per machine; 0 trains on the CPU. One training process for each GPU."""
    threads: int = Field(default=2, ge=1, le=1024)
    """CPU threads of a training process. The count changes the resulting bits, so it is part of the keys of base_policy
    and checkpoint and does not depend on the machine: results are the same on 2 cores and on 64.
    """
    ranks: int = Field(default=1, ge=1, le=1024)
    """Training processes on a machine without GPUs. Each computes a share of every batch with `threads` threads. The
    count changes the resulting bits.
    """
    timeout_s: float = Field(default=86_400.0, gt=0, le=1_000_000_000)
    """Maximum run time of a training process, in seconds."""

    @property
    def device(self) -> Device:
        """Where training processes compute."""
        return "cuda" if self.gpus else "cpu"

    @property
    def processes(self) -> int:
        """Training processes on all machines."""
        return self.nodes * (self.gpus or self.ranks)

    @property
    def all_gpus(self) -> int:
        """GPUs on all machines."""
        return self.nodes * self.gpus

    @property
    def job_fields(self) -> dict[str, Any]:
        """Settings that a job has too, as fields of it."""
        backend = {name: getattr(self, name) for name in BackendConfig.model_fields}
        return {**backend, "device": self.device, "threads": self.threads, "ranks": self.processes}

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if self.gpus and self.ranks != 1:
            raise ValueError(
                f"ranks {self.ranks} is for machines without GPUs, gpus is {self.gpus}: remove one of them"
            )
        self.check_expert_ranks(self.processes)
        return self

    @property
    def numerics(self) -> dict[str, str | int]:
        """Settings, beyond inputs, configuration and torch, that affect the resulting bits; part of the action key."""
        place = {"device": self.device, "threads": self.threads, "ranks": self.processes}
        return {**self.backend_numerics, **place}


_MOVED = {name: f"algorithm.{name}" for name in ("clip_low", "clip_high", "dual_clip")} | {
    "importance_cap": "corrections.importance_cap"
}
"""New places of former keys of `trainer.grpo`, below `trainer`; the others are there themselves."""
_FORMER_ALGORITHM = "{kind: grpo, advantage: group_mean, aggregation: token, clip_high: 0.28, dual_clip: 3.0}"


class ExperimentWatch(WatchConfig):
    """Further destinations of training metrics, which checkpoints and asset pages always have."""

    folder: str | None = Field(default=None, min_length=1)
    """Folder of their files, on the machine or pod that trains: FOLDER/EXPERIMENT/base, and one for each iteration."""

    @model_validator(mode="after")
    def _has_a_place(self) -> Self:
        if (self.tensorboard or self.wandb or self.mlflow) and self.folder is None:
            raise ValueError("tensorboard, wandb and mlflow write files: set folder")
        return self

    def run(self, experiment: str, training: str) -> WatchedRun | None:
        """The run of a training, `base` or an iteration; None: it is not watched."""
        if self.folder is None:
            return None
        watch = WatchConfig(**{name: getattr(self, name) for name in WatchConfig.model_fields})
        return WatchedRun(watch=watch, output=Path(self.folder, experiment, training), name=f"{experiment}/{training}")


class TrainerConfig(RlConfig):
    """Training of one iteration."""

    launcher: LauncherConfig = LauncherConfig()
    """Where training runs."""
    watch: ExperimentWatch = ExperimentWatch()
    """Further destinations of metrics. Not part of any key."""

    @property
    def rl(self) -> RlConfig:
        """Settings of the training alone, without the place where it runs."""
        return RlConfig(**{name: getattr(self, name) for name in RlConfig.model_fields})

    @model_validator(mode="before")
    @classmethod
    def _no_grpo_section(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "grpo" not in values:
            return values
        old = values["grpo"] if isinstance(values["grpo"], dict) else {}
        moves = ", ".join(f"grpo.{name} to trainer.{_MOVED.get(name, name)}" for name in old) or "its keys to trainer"
        raise ValueError(
            f"trainer.grpo no longer exists: move {moves}; for the same training as before also write"
            f" trainer.algorithm: {_FORMER_ALGORITHM}, unless the file sets those keys itself"
        )
