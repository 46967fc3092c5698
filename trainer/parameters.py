"""Weights of the trainer: float32 masters, their FP8 codes and scales, and the leaves that the forward pass reads.

The recipe decides how leaves derive from masters: through FP8 codes, by rounding to bfloat16, or not at all.

    masters --quantize, once an optimizer step--> codes, scales --dequantize--> leaves --forward/backward--> gradients
    --> masters

The gradient with respect to a leaf is applied to its master: the straight-through estimator. All tensors of one shape
lie in one buffer, so that quantization and optimizers run over whole buffers. Experts of a layer are stacked: [experts,
rows, columns].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from triplane_kernels.blockwise import dequantize_blockwise, quantize_blockwise
from triplane_kernels.quantize import dequantize_weights_into, quantize_weights

from contracts.architectures import parameter_shapes
from contracts.checkpoints import BLOCK, is_quantized
from contracts.precision import Forward, exported_forward

PLAIN = "plain"


@dataclass
class Buffer:
    """Tensors that share one allocation.

    Projections: `master`, `leaf`, `gradient` are [matrices, rows, columns] of one shape, quantized if the recipe has
    FP8 weights. Plain: [elements], without quantization.
    """

    name: str
    master: Tensor
    leaf: Tensor
    gradient: Tensor
    spans: dict[str, tuple[int, int, tuple[int, ...]]]
    """Parameter name -> (start, end, shape) along the first dimension."""
    codes: Tensor | None = None
    """float8_e4m3fn [matrices, rows, columns]."""
    scales: Tensor | None = None
    """float32 [matrices, ceil(rows/128), ceil(columns/128)]."""
    dtype: torch.dtype = torch.float32
    """Dtype whose values the leaves hold if the buffer is not quantized."""
    power_of_two: bool = False
    """Whether scales are powers of two."""

    def to(self, device: torch.device) -> Buffer:
        """The same tensors on `device`."""
        master, codes, scales = self.master.to(device), self.codes, self.scales
        return replace(
            self,
            master=master,
            leaf=master if self.leaf is self.master else self.leaf.to(device),
            gradient=self.gradient.to(device),
            codes=None if codes is None else codes.to(device),
            scales=None if scales is None else scales.to(device),
        )

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """Part of `buffer` that belongs to parameter `name`, in the parameter's shape."""
        start, end, shape = self.spans[name]
        return buffer[start:end].view(shape)

    def leaves(self) -> Iterator[tuple[str, Tensor]]:
        """(name, leaf) of every parameter; its gradient accumulates in `gradient`."""
        for name in self.spans:
            leaf = self.view(self.leaf, name).detach().requires_grad_()
            leaf.grad = self.view(self.gradient, name)
            yield name, leaf

    def requantize(self) -> None:
        """Derive codes, scales and leaves from the masters."""
        if self.codes is not None:
            self.codes, self.scales = quantize_stack(self.master, self.power_of_two)
            dequantize_into(self.leaf, self.codes, self.scales)
        elif self.leaf is not self.master:
            self.leaf.copy_(self.master.to(self.dtype))


@dataclass
class Parameters:
    """A model's weights.

    `leaves` are the input of `trainer.model`. Call `requantize` after every change of the masters.
    """

    config: dict[str, Any]
    """Content of the checkpoint's config.json."""
    buffers: list[Buffer]
    leaves: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def from_masters(cls, config: dict[str, Any], masters: Mapping[str, Tensor]) -> Parameters:
        """Parameters around copies of `masters`, a float32 tensor for each of `parameter_shapes`, quantized at once."""
        grouped: dict[str, list[str]] = {}
        for name, shape in parameter_shapes(config).items():
            group = "x".join(map(str, shape[-2:])) if is_quantized(name) else PLAIN
            grouped.setdefault(group, []).append(name)
        forward = exported_forward(config)
        parameters = cls(config, [_buffer(group, names, masters, forward) for group, names in grouped.items()])
        parameters.leaves = {name: leaf for buffer in parameters.buffers for name, leaf in buffer.leaves()}
        parameters.requantize()
        return parameters

    def to(self, device: torch.device) -> Parameters:
        """The same weights on `device`, codes and scales as they are."""
        if device == self.buffers[0].master.device:
            return self
        buffers = [buffer.to(device) for buffer in self.buffers]
        leaves = {name: leaf for buffer in buffers for name, leaf in buffer.leaves()}
        return Parameters(self.config, buffers, leaves)

    @torch.no_grad()
    def requantize(self) -> None:
        """Derive codes, scales and leaves of every buffer from its masters."""
        for buffer in self.buffers:
            buffer.requantize()

    @torch.no_grad()
    def set_codes(self, codes: Mapping[str, Tensor], scales: Mapping[str, Tensor]) -> None:
        """Set codes and scales, and derive masters from them without quantizing: the forward pass of a loaded
        checkpoint.
        """
        for buffer in self.buffers:
            if buffer.codes is None or buffer.scales is None:
                continue
            for name, (start, end, _) in buffer.spans.items():
                buffer.codes[start:end] = codes[name].view(buffer.codes[start:end].shape)
                buffer.scales[start:end] = scales[name].view(buffer.scales[start:end].shape)
            dequantize_into(buffer.leaf, buffer.codes, buffer.scales)
            buffer.master.copy_(buffer.leaf)

    def codes(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """(name, codes, scales) of every quantized parameter, [..., rows, columns] each."""
        for buffer in self.buffers:
            if buffer.codes is None or buffer.scales is None:
                continue
            for name, (start, end, shape) in buffer.spans.items():
                scales = buffer.scales[start:end]
                yield name, buffer.view(buffer.codes, name), scales.view(*shape[:-2], *scales.shape[-2:])

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """(name, float32 master) of every parameter."""
        for buffer in self.buffers:
            for name in buffer.spans:
                yield name, buffer.view(buffer.master, name)

    def clear_gradients(self) -> None:
        """Set all gradients to zero, in place."""
        for buffer in self.buffers:
            buffer.gradient.zero_()

    def clip_gradients(self, limit: float) -> Tensor:
        """Scale all gradients down to the global norm `limit` and return the norm before."""
        norm: Tensor = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(buffer.gradient) for buffer in self.buffers])
        )
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([buffer.gradient for buffer in self.buffers], factor)
        return norm


def draw_masters(config: Mapping[str, Any], seed: int, device: str = "cpu") -> dict[str, Tensor]:
    """Fresh float32 masters: norms are 1, all others normally distributed with `initializer_range`. The same seed draws
    other numbers on another kind of device.
    """
    generator = torch.Generator(device).manual_seed(seed)
    return {
        name: (
            torch.ones(shape, device=device)
            if len(shape) == 1
            else torch.empty(shape, device=device).normal_(0.0, config["initializer_range"], generator=generator)
        )
        for name, shape in parameter_shapes(config).items()
    }


def quantize_stack(matrices: Tensor, power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """`quantize_blockwise` of each of [matrices, rows, columns]: codes of that shape and scales [matrices, row blocks,
    column blocks]. power_of_two: scales rounded up to powers of two.

    On a GPU the kernel computes the same bits in one pass, without copies of the size of `matrices`.
    """
    if matrices.is_cuda:
        return quantize_weights(matrices, power_of_two=power_of_two)
    count, rows, columns = matrices.shape
    padded = torch.nn.functional.pad(matrices, (0, 0, 0, -rows % BLOCK))
    codes, scales = quantize_blockwise(padded.reshape(-1, columns), power_of_two=power_of_two)
    return codes.view(padded.shape)[:, :rows].contiguous(), scales.view(count, -1, scales.shape[1])


def dequantize_stack(codes: Tensor, scales: Tensor) -> Tensor:
    """Inverse of `quantize_stack`: float32 [matrices, rows, columns]."""
    _, rows, columns = codes.shape
    padded = torch.nn.functional.pad(codes.float(), (0, 0, 0, -rows % BLOCK))
    return dequantize_blockwise(padded.reshape(-1, columns), scales.reshape(-1, scales.shape[2])).view(padded.shape)[
        :, :rows
    ]


def dequantize_into(leaf: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write `dequantize_stack` into leaf, float32 [matrices, rows, columns]; on a GPU in one pass."""
    if leaf.is_cuda:
        dequantize_weights_into(leaf, codes, scales)
    else:
        leaf.copy_(dequantize_stack(codes, scales))


def _buffer(group: str, names: list[str], masters: Mapping[str, Tensor], forward: Forward) -> Buffer:
    parts, spans, start = [], {}, 0
    for name in names:
        shape = tuple(masters[name].shape)
        part = masters[name].detach().float()
        parts.append(part.reshape(-1) if group == PLAIN else part.reshape(-1, *shape[-2:]))
        spans[name] = (start, start + parts[-1].shape[0], shape)
        start += parts[-1].shape[0]
    master = torch.cat(parts)
    if group == PLAIN or not forward.quantized:
        dtype = torch.bfloat16 if forward.activations == "bfloat16" else torch.float32
        leaf = master if dtype == torch.float32 else torch.empty_like(master)
        return Buffer(group, master, leaf, torch.zeros_like(master), spans, dtype=dtype)
    codes, scales = quantize_stack(master, forward.power_of_two)
    leaf = torch.empty_like(master)
    return Buffer(
        group, master, leaf, torch.zeros_like(master), spans, codes, scales, power_of_two=forward.power_of_two
    )
