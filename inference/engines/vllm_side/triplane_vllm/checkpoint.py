"""Independent reader of the checkpoint directory that vLLM loads, plain or in FP8 blocks of 128 x 128."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

BLOCK = 128
SCALE = "_scale_inv"


class Checkpoint:
    """Tensors by name, as stored (`raw`) or dequantized (`weight`)."""

    def __init__(self, directory: str) -> None:
        folder = Path(directory)
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file: Any = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds the tensor."""
        return name in self._files

    def raw(self, name: str) -> Tensor:
        """The tensor as stored."""
        if name not in self._files:
            raise KeyError(f"the checkpoint has no tensor {name}")
        found: Tensor = self._files[name].get_tensor(name)
        return found

    def weight(self, name: str) -> Tensor:
        """[N, K] or [N], float32: codes times their block's scale where the tensor is quantized."""
        stored = self.raw(name)
        if not self.has(name + SCALE):
            return stored.float()
        scale = self.raw(name + SCALE).float()
        rows, columns = stored.shape
        full = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        return stored.to(torch.float32) * full
