"""The device of a rank: the CPU, or one NVIDIA GPU for each rank of a machine."""

from __future__ import annotations

import os

import torch

from trainer.config import Device
from trainer.errors import TrainingConfigError

CPU = torch.device("cpu")


def open_device(name: Device) -> torch.device:
    """The device of this process; with cuda the GPU of $LOCAL_RANK, which becomes torch's current one.

    Raises TrainingConfigError if this process has no such GPU.
    """
    if name == "cpu":
        return CPU
    local = int(os.environ.get("LOCAL_RANK", "0"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local >= count:
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        raise TrainingConfigError(
            f"job field device is cuda, but torch, built {built}, finds {count} GPU(s) here and rank {local} of this"
            " machine needs one of its own: set trainer.launcher.gpus to the number of GPUs, install a torch with CUDA,"
            " or set trainer.launcher.gpus to 0 to train on the CPU"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device
