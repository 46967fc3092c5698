"""Check a checkpoint's weights, to explain why an engine refused it."""

from __future__ import annotations

import json
from pathlib import Path

from contracts.checkpoints import check_checkpoint
from contracts.errors import SchemaError


def weights_fault(directory: Path) -> str | None:
    """First tensor that is missing, malformed or not finite, as text, or None.

    Loads one tensor at a time.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        if "quantization_config" in json.loads((directory / "config.json").read_text()):
            check_checkpoint(directory)
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    if not bool(torch.isfinite(file.get_tensor(name).float()).all()):
                        return (
                            f"checkpoint {directory}: tensor {name} is not finite; its training diverged, don't"
                            " serve it"
                        )
    except SchemaError as error:
        return str(error)
    except (OSError, ValueError, SafetensorError) as error:
        return f"checkpoint {directory} is not readable ({error}): export it again"
    return None
