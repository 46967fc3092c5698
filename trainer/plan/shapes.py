"""Elements of a model's parameters, as the trainer groups them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contracts.architectures import Architecture, parameter_shapes
from contracts.checkpoints import BLOCK, is_quantized


@dataclass(frozen=True)
class Group:
    """Parameters that share one buffer of `trainer.parameters`."""

    elements: int
    scales: int
    """Blocks of 128 x 128; 0 if the group is not quantized."""


@dataclass(frozen=True)
class Shapes:
    """Sizes of a model, in elements."""

    model: Architecture
    groups: tuple[Group, ...]
    """The quantized ones by matrix shape, and the plain one."""
    layer: int
    """Parameters of one decoder layer."""
    experts: int
    """Those of a layer's experts, which are in `layer`, too."""
    outside: int
    """Parameters outside the layers: embedding, last norm, output head."""
    largest: int
    """Elements of the largest parameter."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shapes:
        """Sizes from a config.json. Raises SchemaError."""
        model, shapes = Architecture.from_config(config), parameter_shapes(config)
        groups: dict[tuple[int, ...], list[int]] = {}
        for name, shape in shapes.items():
            own = groups.setdefault(shape[-2:] if is_quantized(name) else (), [0, 0])
            own[0] += math.prod(shape)
            own[1] += _blocks(shape) if is_quantized(name) else 0
        first = {name: math.prod(shape) for name, shape in shapes.items() if name.startswith("model.layers.0.")}
        layer = sum(first.values())
        experts = sum(size for name, size in first.items() if ".experts." in name)
        found = tuple(Group(*sizes) for sizes in groups.values())
        total = sum(group.elements for group in found)
        outside, largest = total - layer * model.layers, max(map(math.prod, shapes.values()))
        return cls(model, found, layer, experts, outside, largest)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return sum(group.elements for group in self.groups)

    @property
    def quantized(self) -> int:
        """Parameters with FP8 codes."""
        return sum(group.elements for group in self.groups if group.scales)

    @property
    def scales(self) -> int:
        """Scales of all codes."""
        return sum(group.scales for group in self.groups)

    @property
    def widest(self) -> int:
        """Elements of the largest group with codes."""
        return max((group.elements for group in self.groups if group.scales), default=0)

    @property
    def broadest(self) -> int:
        """Elements of the largest group."""
        return max(group.elements for group in self.groups)


def _blocks(shape: tuple[int, ...]) -> int:
    *stack, rows, columns = shape
    return math.prod(stack) * -(-rows // BLOCK) * -(-columns // BLOCK)
