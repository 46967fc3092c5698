"""Blocking check that a checkpoint has all tensors before a policy is used."""

from __future__ import annotations

import dagster as dg

from contracts.adapters import read_adapter
from contracts.artifacts import Artifact
from contracts.checkpoints import check_checkpoint, expected_tensors
from contracts.errors import SchemaError
from ops.health import checked

CHECK = "layout_is_complete"


def layout_check(checkpoint: Artifact) -> dg.AssetCheckResult:
    """Whether the checkpoint holds exactly the tensors its config.json implies."""
    try:
        config = check_checkpoint(checkpoint.directory())
        read_adapter(checkpoint.directory(), config)
    except SchemaError as error:
        return checked(CHECK, False, str(error))
    tensors = len(expected_tensors(config))
    return checked(CHECK, True, f"The checkpoint has all {tensors:,} tensors.", tensors=tensors)
