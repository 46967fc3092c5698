"""Errors of training; each message names the fix."""

from __future__ import annotations

from signal import Signals

from contracts.errors import ConfigError, TriplaneError

LAST_WORDS = "trainer: "
"""Prefix of the reason in the last line of a failed trainer."""
RANKS_LOST_STATUS = 3
"""Exit status of a rank that ends since another one did, and of a job whose rank did not answer."""
DIVERGED_STATUS = 4
"""Exit status of a training whose loss or gradient is no longer finite."""


class TrainingConfigError(ConfigError):
    """A job is malformed or contradicts the artifacts it names."""


class TrainingError(TriplaneError):
    """Training can't continue."""


class TrainingDataError(TrainingError):
    """Demonstrations or a dataset lack data for training."""


class SnapshotRefused(TrainingError):
    """The snapshot of a job is damaged, or of a job with other settings."""


class TrainingDiverged(TrainingError):
    """The loss or the gradient is no longer finite."""

    exit_status = DIVERGED_STATUS


class OffPolicyRefused(TrainingError):
    """The episodes are too far from the starting weights to train on."""


class TrainingMemoryError(TrainingError):
    """The job needs more memory than this machine or its limits allow."""


class TrainingStopped(TrainingError):
    """The process was asked to stop (SIGTERM or Ctrl-C)."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {Signals(number).name}: run the same job again to continue")
        self.exit_status = 128 + number


class RanksLost(TrainingError):
    """Another rank of the job has ended or does not answer."""

    def __init__(self, rank: int, count: int, reason: str) -> None:
        super().__init__(f"rank {rank} of {count} lost another rank ({reason}): run the same job again to continue")
        self.exit_status = RANKS_LOST_STATUS


class RanksFailed(TrainingError):
    """A rank ended, so the job was stopped."""

    def __init__(self, rank: int, count: int, reason: str, status: int | None) -> None:
        super().__init__(f"rank {rank} of {count}: {reason}")
        if status is None:
            self.exit_status = RANKS_LOST_STATUS
        else:
            self.exit_status = status if status > 0 else 128 - status if status else 1
