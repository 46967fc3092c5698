"""Result of a training job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contracts.artifacts import ArtifactRef


@dataclass(frozen=True)
class TrainResult:
    """References to published artifacts, and a few numbers."""

    checkpoint: ArtifactRef
    trainer_state: ArtifactRef
    metrics: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Result as printed in the last line of stdout and sent through Dagster Pipes."""
        return {
            "checkpoint": self.checkpoint.model_dump(),
            "trainer_state": self.trainer_state.model_dump(),
            "metrics": self.metrics,
        }
