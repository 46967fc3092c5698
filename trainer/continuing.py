"""What a checkpoint must be for a training to start from it: the same recipe, the same adapter. Reads no tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from contracts.adapters import ADAPTER_CONFIG, FOLDER, Adapter, read_adapter_config
from contracts.artifacts import Artifact, ArtifactRef
from trainer.config import RlConfig
from trainer.errors import TrainingConfigError
from trainer.precision import Precision, precision_of


def require_continuable(begin: Artifact, config: RlConfig) -> None:
    """Raise TrainingConfigError unless a training with this configuration can start from checkpoint `begin`: it has the
    same recipe, and the same adapter or none.
    """
    require_precision(begin, json.loads(begin.path("config.json").read_bytes()), config.precision)
    name, wanted = f"{FOLDER}/{ADAPTER_CONFIG}", config.lora.adapter if config.lora else None
    found = read_adapter_config(begin.path(name)) if name in begin.names() else None
    require_same_adapter(found, wanted, begin.ref)


def require_precision(begin: Artifact, model: Mapping[str, Any], wanted: Precision) -> None:
    """Raise TrainingConfigError unless checkpoint `begin`, which has this config.json, is of the recipe `wanted`."""
    found = precision_of(model)
    if found != wanted:
        raise TrainingConfigError(
            f"trainer.precision is {wanted.model_dump()}, but checkpoint {begin.ref.short} is made by"
            f" {found.model_dump()}: set trainer.precision to that, or make a base policy by the new one"
        )


def require_same_adapter(found: Adapter | None, wanted: Adapter | None, checkpoint: ArtifactRef) -> None:
    """Raise TrainingConfigError unless training continues the checkpoint's adapter, or begins one on a plain base."""
    if found is None or found == wanted:
        return
    said = f"rank {found.rank}, alpha {found.alpha:g}, targets {', '.join(found.targets)}"
    raise TrainingConfigError(
        f"{wanted or 'no adapter'} is to be trained, but checkpoint {checkpoint.short} has an adapter of {said}: set"
        " trainer.lora to these values, or start from a checkpoint without an adapter"
    )
