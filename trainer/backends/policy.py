"""The model as torch modules, one for each layer, for backends that shard modules.

    sharded masters --gathered by the backend--> a layer's masters --quantized--> leaves --decoder_layer--> hidden

Every rank quantizes what it gathered, in each forward pass and again in the backward pass: blocks of 128 x 128 are
never torn, whatever the number of ranks, and all ranks have the codes that are exported. The gradient of a leaf is that
of its master (straight through).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from contracts.adapters import Adapter, factor_names
from contracts.checkpoints import is_quantized
from contracts.precision import Forward, exported_forward
from trainer.backends.expert_parallel import exchanged_mixture
from trainer.model import Batch, LayerOutput, Replay, Rotary, Routing, Scores, decoder_layer, score
from trainer.parameters import dequantize_stack, quantize_stack
from trainer.recipes import recipe_of
from trainer.recipes.base import Experts

Outputs = tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...] | None, Replay | None]
"""`Scores` without nesting, in which the backends' hooks find the tensors."""


EXPERTS = ".mlp.experts."
"""Part of the names of experts' parameters."""
Shapes = Mapping[str, tuple[int, ...]]
"""Parameter name -> shape."""


class _Unit(nn.Module):
    """Parameters that a backend gathers together. With an adapter they are frozen leaves, beside factors that train."""

    def __init__(self, config: Mapping[str, Any], shapes: Shapes, adapter: Adapter | None) -> None:
        """shapes: of the unit's own parameters. They are uninitialized, on torch's default device."""
        super().__init__()
        self._config, self._forward, self._adapter = config, exported_forward(dict(config)), adapter
        self._own, self._every = list(shapes), list(shapes)
        for name in shapes:
            self.register_parameter(_attribute(name), nn.Parameter(torch.empty(shapes[name]), adapter is None))
        for name in shapes:
            if adapter is not None and adapter.adapts(name):
                for factor, shape in adapter.factors_of(name, shapes[name]).items():
                    self._every.append(factor)
                    self.register_parameter(_attribute(factor), nn.Parameter(torch.empty(shape)))

    def named(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in a checkpoint, factors by `factor_names`."""
        return {name: self._parameter(name) for name in self._every}

    def leaves(self) -> dict[str, Tensor]:
        """What the forward pass reads of the unit's own parameters."""
        return {name: self._leaf(name) for name in self._own}

    def derives(self, name: str) -> bool:
        """Whether the leaf of a parameter is another tensor than the parameter."""
        return rounds(name, self._forward) if self._adapter is None else self._adapter.adapts(name)

    def leaf(self, name: str) -> Tensor:
        """Leaf of one of the unit's own parameters, made again, without gradient."""
        with torch.no_grad():
            return self._leaf(name)

    def _leaf(self, name: str) -> Tensor:
        if self._adapter is None:
            return leaf_of(name, self._parameter(name), self._forward)
        if not self._adapter.adapts(name):
            return self._parameter(name)
        first, second = map(self._parameter, factor_names(name))
        return self._parameter(name) + self._adapter.scale * (second @ first)

    def _parameter(self, name: str) -> nn.Parameter:
        found: nn.Parameter = getattr(self, _attribute(name))
        return found


class Policy(_Unit):
    """The whole model. Its own parameters are the embedding, the last norm and the output head."""

    def __init__(
        self,
        config: Mapping[str, Any],
        shapes: Shapes,
        *,
        recompute: bool,
        adapter: Adapter | None = None,
        expert_group: dist.ProcessGroup | None = None,
    ) -> None:
        """shapes: of this rank's parameters, without factors.

        recompute: compute each layer again in backward instead of keeping its activations. adapter: to train in place
        of the weights. expert_group: ranks that divide the experts of each layer; `shapes` then has this rank's alone.
        None: each rank computes all experts.
        """
        count = config["num_hidden_layers"]
        prefixes = [f"model.layers.{index}." for index in range(count)]
        within = [{name: shapes[name] for name in shapes if name.startswith(prefix)} for prefix in prefixes]
        outside = {name: shapes[name] for name in shapes if not any(name in each for each in within)}
        super().__init__(config, outside, adapter)
        self.layers = nn.ModuleList(
            Layer(config, index, each, recompute, adapter, expert_group) for index, each in enumerate(within)
        )

    def forward(self, batch: Batch, temperature: float, routing: bool) -> Outputs:
        """`trainer.model.score`, whose result `as_scores` restores."""
        found = score(self.leaves(), self._config, batch, temperature, routing=routing, run=self._run_layer)
        routing_ = found.routing
        sums = None if routing_ is None else (routing_.counts, routing_.probabilities, routing_.squares)
        # no view: FSDP2 warns of those
        return found.logprobs.clone(), found.entropy, found.hidden, sums, found.replay

    def named(self) -> dict[str, nn.Parameter]:
        """See _Unit.named."""
        found = super().named()
        for layer in self.layers:
            assert isinstance(layer, Layer)
            found |= layer.named()
        return found

    def _run_layer(self, index: int, hidden: Tensor, batch: Batch, rotary: Rotary) -> LayerOutput:
        output: LayerOutput = self.layers[index](hidden, batch, rotary)
        return output


class Layer(_Unit):
    """One decoder layer."""

    def __init__(
        self,
        config: Mapping[str, Any],
        index: int,
        shapes: Shapes,
        recompute: bool,
        adapter: Adapter | None,
        expert_group: dist.ProcessGroup | None,
    ) -> None:
        """See `Policy`. shapes: of the layer's parameters."""
        inside = {name: shapes[name] for name in shapes if EXPERTS in name and expert_group is not None}
        super().__init__(config, {name: shapes[name] for name in shapes if name not in inside}, adapter)
        self._index, self._recompute = index, recompute
        self.experts = (
            LayerExperts(config, inside, recompute, adapter, expert_group) if inside and expert_group else None
        )

    def named(self) -> dict[str, nn.Parameter]:
        """See _Unit.named."""
        return super().named() | (self.experts.named() if self.experts is not None else {})

    def forward(self, hidden: Tensor, batch: Batch, rotary: Rotary) -> LayerOutput:
        """See `trainer.model.decoder_layer`."""
        if not torch.is_grad_enabled():
            return self._body(hidden, batch, rotary)
        if self._recompute:
            output: LayerOutput = checkpoint(self._body, hidden, batch, rotary, use_reentrant=False)
            return output
        leaves = self.leaves()
        with _Forgotten(self, leaves):
            return decoder_layer(leaves, self._config, self._index, hidden, batch, rotary, self.experts)

    def _body(self, hidden: Tensor, batch: Batch, rotary: Rotary) -> LayerOutput:
        return decoder_layer(self.leaves(), self._config, self._index, hidden, batch, rotary, self.experts)


class LayerExperts(_Unit):
    """This rank's experts of one layer."""

    def __init__(
        self,
        config: Mapping[str, Any],
        shapes: Shapes,
        recompute: bool,
        adapter: Adapter | None,
        group: dist.ProcessGroup,
    ) -> None:
        """See `Policy`. shapes: of this rank's experts."""
        super().__init__(config, shapes, adapter)
        self._recompute, self._group = recompute, group

    def forward(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """See `exchanged_mixture`."""
        leaves = self.leaves()
        stacks = {name.split(".")[-2]: leaf for name, leaf in leaves.items()}
        experts = Experts(*(stacks[f"{name}_proj"] for name in ("gate", "up", "down")))
        # a layer that is computed again saves nothing
        saves = torch.is_grad_enabled() and not self._recompute
        with _Forgotten(self, leaves) if saves else nullcontext():
            return exchanged_mixture(recipe_of(self._config), rows, shares, chosen, experts, self._group)


class _Forgotten(torch.autograd.graph.saved_tensors_hooks):
    """Saves, in place of a leaf that was derived, how to make it again, so that gathered weights are freed between
    forward and backward.
    """

    def __init__(self, unit: _Unit, leaves: Mapping[str, Tensor]) -> None:
        places = {leaf.untyped_storage().data_ptr(): name for name, leaf in leaves.items() if unit.derives(name)}

        def pack(tensor: Tensor) -> Any:
            name = places.get(tensor.untyped_storage().data_ptr())
            if name is None or tensor.dtype != torch.float32:
                return tensor
            return name, tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(saved: Any) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            name, *view = saved
            return unit.leaf(name).as_strided(*view)

        super().__init__(pack, unpack)


def _attribute(name: str) -> str:
    return name.replace(".", "__")


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
