"""Check a checkpoint's weights, to explain why an engine refused it."""

from __future__ import annotations

import json
from pathlib import Path

from contracts.artifacts import Artifact
from contracts.checkpoints import WEIGHTS, check_checkpoint
from contracts.errors import InfraFault, SchemaError, TriplaneError
from contracts.precision import FORWARD
from contracts.tensor_files import TensorFiles, is_finite
from inference.errors import EngineUnreachable, StaleVersion, WeightsDiffer
from resources.errors import ImpossibleCompletion


def fault_behind(error: TriplaneError, policy: Artifact) -> str | None:
    """Defect of a policy that explains `error` of an engine or of the connection to it; None if none can be shown."""
    if isinstance(error, (SchemaError, WeightsDiffer, ImpossibleCompletion)):
        return str(error)
    if isinstance(error, (EngineUnreachable, InfraFault, StaleVersion)):
        return None
    return weights_fault(policy.directory())


def weights_fault(directory: Path) -> str | None:
    """First tensor that is missing, malformed or not finite, as text, or None.

    Loads one tensor at a time.
    """
    try:
        config = json.loads((directory / "config.json").read_bytes())
        if "quantization_config" in config or FORWARD in config:
            check_checkpoint(directory)
        files = TensorFiles(directory, WEIGHTS)
        for name in files.forms:
            if not is_finite(files.tensor(name)):
                return f"checkpoint {directory}: tensor {name} is not finite; its training diverged, don't serve it"
    except SchemaError as error:
        return str(error)
    except (OSError, ValueError) as error:
        return f"checkpoint {directory} is not readable ({error}): export it again"
    return None
