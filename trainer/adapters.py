"""LoRA: the weights of a checkpoint stay as they are, and low-rank factors beside them are trained.

    frozen leaf W -----------------+
                                   +--> W + alpha / rank * B @ A --forward/backward--> gradients of A and B
    factors A, B (float32) --------+

The forward pass reads the merged weights, the very ones that the built-in engine and vLLM's plain copy serve. Source:
arXiv:2106.09685, section 4.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contracts.adapters import (
    Adapter,
    adapted_names,
    adapter_files,
    exported_factors,
    factor_names,
    factor_shapes,
)
from contracts.artifacts import Artifact, ArtifactRef
from trainer.errors import TrainingDataError
from trainer.parameters import PLAIN, Buffer, Parameters
from trainer.tensors import read_tensor


class MergedLeaves(Mapping[str, Tensor]):
    """Leaves of the base, with the adapters added to those that have some. Each look-up merges anew, so that every
    forward pass has its own graph.
    """

    def __init__(self, base: Mapping[str, Tensor], factors: Mapping[str, Tensor], scale: float) -> None:
        self._base, self._factors, self._scale = base, factors, scale

    def __getitem__(self, name: str) -> Tensor:
        first, second = factor_names(name)
        weight = self._base[name]
        if first not in self._factors:
            return weight
        return weight + self._scale * (self._factors[second] @ self._factors[first])

    def __contains__(self, name: object) -> bool:
        return name in self._base

    def __iter__(self) -> Iterator[str]:
        return iter(self._base)

    def __len__(self) -> int:
        return len(self._base)


@dataclass(frozen=True)
class AdaptedBase:
    """A checkpoint whose weights stay as they are, and the adapter that is trained beside them."""

    checkpoint: Artifact
    adapter: Adapter


@dataclass(kw_only=True)
class AdaptedParameters(Parameters):
    """Trainable factors over a frozen base. `buffers`, gradients and `masters` are those of the factors alone."""

    base: Parameters
    """The frozen weights."""
    adapter: Adapter

    def to(self, device: torch.device) -> AdaptedParameters:
        """See Parameters.to."""
        if device == self.buffers[0].master.device:
            return self
        base, buffer = self.base.to(device), self.buffers[0].to(device)
        leaves = _merged(base, buffer, self.adapter)
        return AdaptedParameters(self.config, [buffer], leaves, base=base, adapter=self.adapter)


def adapt(base: Parameters, adapter: Adapter, factors: Mapping[str, Tensor]) -> AdaptedParameters:
    """Parameters that train copies of `factors`, one for each of `factor_shapes`, over `base`, which is frozen."""
    spans: dict[str, tuple[int, int, tuple[int, ...]]] = {}
    start = 0
    for name, shape in factor_shapes(base.config, adapter).items():
        spans[name] = (start, start + factors[name].numel(), shape)
        start = spans[name][1]
    master = torch.cat([factors[name].detach().float().reshape(-1) for name in spans])
    buffer = Buffer(PLAIN, master, master, torch.zeros_like(master), spans)
    return AdaptedParameters(base.config, [buffer], _merged(base, buffer, adapter), base=base, adapter=adapter)


def _merged(base: Parameters, buffer: Buffer, adapter: Adapter) -> MergedLeaves:
    """Leaves of the frozen `base` with the factors in `buffer`."""
    frozen = {name: leaf.detach() for name, leaf in base.leaves.items()}
    return MergedLeaves(frozen, dict(buffer.leaves()), adapter.scale)


def draw_factors(config: Mapping[str, Any], adapter: Adapter, seed: int) -> dict[str, Tensor]:
    """Fresh factors: A uniform in +-1/sqrt(in), as PEFT draws it, and B zero, so that training starts at the base."""
    generator = torch.Generator().manual_seed(seed)
    shapes, factors = factor_shapes(config, adapter), {}
    for name in adapted_names(config, adapter):
        first, second = factor_names(name)
        bound = shapes[first][-1] ** -0.5
        factors[first] = torch.empty(shapes[first]).uniform_(-bound, bound, generator=generator)
        factors[second] = torch.zeros(shapes[second])
    return factors


def read_factors(directory: Path, config: Mapping[str, Any], adapter: Adapter) -> dict[str, Tensor]:
    """Factors of the adapter in a checkpoint directory, experts stacked."""
    files, factors = adapter_files(directory), {}
    for name, shape in factor_shapes(config, adapter).items():
        factors[name] = torch.stack([read_tensor(files, single) for single in exported_factors(name, shape)]).view(
            shape
        )
    return factors


def adapter_tensors(factors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors of adapter_model.safetensors by name. They share the memory of the factors."""
    tensors: dict[str, Tensor] = {}
    for name, factor in factors:
        singles = exported_factors(name, tuple(factor.shape))
        tensors |= dict(zip(singles, factor if factor.dim() == 3 else [factor], strict=True))
    return tensors


def require_same_factors(found: Mapping[str, Tensor], saved: Mapping[str, Tensor], checkpoint: ArtifactRef) -> None:
    """Raise TrainingDataError unless the trainer state holds the checkpoint's factors."""
    same = set(found) == set(saved) and all(torch.equal(found[name], saved[name]) for name in found)
    if not same:
        raise TrainingDataError(
            f"the trainer_state does not hold the adapter of checkpoint {checkpoint.short}: pass the two of one key"
        )
