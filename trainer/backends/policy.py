"""The model as torch modules, one for each layer, for backends that shard modules.

    sharded masters --gathered by the backend--> a layer's masters --quantized--> leaves --decoder_layer--> hidden

Every rank quantizes what it gathered, in each forward pass and again in the backward pass: blocks of 128 x 128 are
never torn, whatever the number of ranks, and all ranks have the codes that are exported. The gradient of a leaf is that
of its master (straight through).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from contracts.checkpoints import is_quantized
from contracts.precision import Forward, exported_forward
from trainer.model import Batch, LayerOutput, Replay, Rotary, Routing, Scores, decoder_layer, score
from trainer.parameters import dequantize_stack, quantize_stack

Outputs = tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...] | None, Replay | None]
"""`Scores` without nesting, in which the backends' hooks find the tensors."""


class Policy(nn.Module):
    """The whole model. Its own parameters are the embedding, the last norm and the output head."""

    def __init__(self, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, recompute: bool) -> None:
        """Parameters are uninitialized, on torch's default device.

        recompute: compute each layer again in backward instead of keeping its activations.
        """
        super().__init__()
        self._config, self._forward = config, exported_forward(dict(config))
        count = config["num_hidden_layers"]
        prefixes = [f"model.layers.{index}." for index in range(count)]
        within = {prefix: [name for name in shapes if name.startswith(prefix)] for prefix in prefixes}
        self._own = _register(self, set(shapes) - {name for names in within.values() for name in names}, shapes)
        self.layers = nn.ModuleList(
            Layer(config, index, {name: shapes[name] for name in within[prefix]}, recompute)
            for index, prefix in enumerate(prefixes)
        )

    def forward(self, batch: Batch, temperature: float, routing: bool) -> Outputs:
        """`trainer.model.score`, whose result `as_scores` restores."""
        leaves = {name: leaf_of(name, getattr(self, attribute), self._forward) for attribute, name in self._own.items()}
        found = score(leaves, self._config, batch, temperature, routing=routing, run=self._run_layer)
        routing_ = found.routing
        sums = None if routing_ is None else (routing_.counts, routing_.probabilities, routing_.squares)
        # no view: FSDP2 warns of those
        return found.logprobs.clone(), found.entropy, found.hidden, sums, found.replay

    def named(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in a checkpoint."""
        found = {name: getattr(self, attribute) for attribute, name in self._own.items()}
        for layer in self.layers:
            assert isinstance(layer, Layer)
            found |= layer.named()
        return found

    def _run_layer(self, index: int, hidden: Tensor, batch: Batch, rotary: Rotary) -> LayerOutput:
        output: LayerOutput = self.layers[index](hidden, batch, rotary)
        return output


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(
        self, config: Mapping[str, Any], index: int, shapes: Mapping[str, tuple[int, ...]], recompute: bool
    ) -> None:
        super().__init__()
        self._config, self._index, self._recompute = config, index, recompute
        self._forward = exported_forward(dict(config))
        self._own = _register(self, shapes, shapes)

    def named(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in a checkpoint."""
        return {name: getattr(self, attribute) for attribute, name in self._own.items()}

    def forward(self, hidden: Tensor, batch: Batch, rotary: Rotary) -> LayerOutput:
        """See `trainer.model.decoder_layer`."""
        if not torch.is_grad_enabled():
            return self._body(hidden, batch, rotary)
        if self._recompute:
            output: LayerOutput = checkpoint(self._body, hidden, batch, rotary, use_reentrant=False)
            return output
        leaves = self._leaves()
        with _Forgotten(self, leaves):
            return decoder_layer(leaves, self._config, self._index, hidden, batch, rotary)

    def _body(self, hidden: Tensor, batch: Batch, rotary: Rotary) -> LayerOutput:
        return decoder_layer(self._leaves(), self._config, self._index, hidden, batch, rotary)

    def _leaves(self) -> dict[str, Tensor]:
        return {name: leaf_of(name, getattr(self, attribute), self._forward) for attribute, name in self._own.items()}

    def rounds(self, name: str) -> bool:
        """Whether the leaf of a parameter differs from its master."""
        return rounds(name, self._forward)

    def leaf(self, name: str) -> Tensor:
        """Leaf of one parameter, made again, without gradient."""
        with torch.no_grad():
            return leaf_of(name, getattr(self, _attribute(name)), self._forward)


class _Forgotten(torch.autograd.graph.saved_tensors_hooks):
    """Saves, in place of a quantized leaf, how to make it again, so that gathered weights are freed between forward and
    backward.
    """

    def __init__(self, layer: Layer, leaves: Mapping[str, Tensor]) -> None:
        places = {leaf.untyped_storage().data_ptr(): name for name, leaf in leaves.items() if layer.rounds(name)}

        def pack(tensor: Tensor) -> Any:
            name = places.get(tensor.untyped_storage().data_ptr())
            if name is None or tensor.dtype != torch.float32:
                return tensor
            return name, tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            name, *view = saved
            return layer.leaf(name).as_strided(*view)

        super().__init__(pack, unpack)


class _StraightThrough(torch.autograd.Function):
    """The values that the recipe's stored dtype keeps of a master; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, master: Tensor, coded: bool, forward: Forward) -> Tensor:
        if not coded:
            return master.bfloat16().float()
        stack = master.reshape(-1, *master.shape[-2:])
        return dequantize_stack(*quantize_stack(stack, forward.power_of_two)).reshape(master.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None, None


def rounds(name: str, forward: Forward) -> bool:
    """Whether the leaf of parameter `name` differs from its master."""
    return (forward.quantized and is_quantized(name)) or forward.activations == "bfloat16"


def leaf_of(name: str, master: Tensor, forward: Forward) -> Tensor:
    """What the forward pass reads of parameter `name`, as `trainer.parameters` derives it from the master."""
    if not rounds(name, forward):
        return master
    leaf: Tensor = _StraightThrough.apply(master, forward.quantized and is_quantized(name), forward)  # type: ignore[no-untyped-call]
    return leaf


def as_scores(outputs: Outputs) -> Scores:
    """Scores from the outputs of a policy."""
    logprobs, entropy, hidden, sums, replay = outputs
    routing = None if sums is None else Routing(*sums)
    return Scores(logprobs, entropy, routing, hidden, replay)


def _attribute(name: str) -> str:
    return name.replace(".", "__")


def _register(module: nn.Module, names: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Register a parameter for each name, in the order of `shapes`. Returns attribute -> name."""
    chosen = set(names)
    found = {_attribute(name): name for name in shapes if name in chosen}
    for attribute, name in found.items():
        module.register_parameter(attribute, nn.Parameter(torch.empty(shapes[name])))
    return found
