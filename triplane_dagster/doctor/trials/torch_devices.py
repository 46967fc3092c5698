"""`python -m triplane_dagster.doctor.trials.torch_devices`: multiply on each device that torch sees, and print its
name.
"""

from __future__ import annotations

import json
from typing import Any

import torch


def fp8_of(capability: tuple[int, int]) -> str:
    """FP8 formats that the tensor cores of a CUDA compute capability support."""
    if capability >= (10, 0):
        return "FP8 and MXFP8 units"
    if capability >= (8, 9):
        return "FP8 units"
    return "no FP8 units"


def describe(index: int) -> dict[str, Any]:
    """Describe one CUDA device after a matrix product on it."""
    device = torch.device("cuda", index)
    square = torch.eye(64, device=device)
    if not torch.equal(square @ square, square):
        raise SystemExit(f"{torch.cuda.get_device_name(index)} multiplies wrongly")
    about = torch.cuda.get_device_properties(index)
    return {
        "name": about.name,
        "memory_gib": round(about.total_memory / 2**30),
        "fp8": fp8_of((about.major, about.minor)),
    }


def main() -> None:
    """Print one JSON object on stdout."""
    square = torch.eye(64)
    if not torch.equal(square @ square, square):
        raise SystemExit("torch multiplies wrongly on this CPU")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    print(json.dumps({"version": torch.__version__, "devices": [describe(index) for index in range(count)]}))


if __name__ == "__main__":
    main()
