"""FSDP2: torch's `fully_shard`, one unit for each layer and one for the rest.

Each parameter is cut along its first dimension: experts into whole experts, matrices into rows. A layer's masters are
gathered for its forward and again for its backward pass, and freed after each. Gradients are summed in float32 onto the
parts. Sources: arXiv:2304.11277 (FSDP), torch.distributed.fsdp.fully_shard (FSDP2).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from contracts.architectures import parameter_shapes
from contracts.store import Store
from trainer.backends.base import Rule
from trainer.backends.policy import Policy, as_scores
from trainer.backends.sharded import ShardedBackend, rows_by_rank
from trainer.backends.shards import ShardedOptimizer, shard_of
from trainer.model import Batch, Scores
from trainer.ranks import Ranks

# torch calls its own deprecated collectives
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


class Fsdp2Backend(ShardedBackend):
    """Masters, gradients and optimizer state are sharded; activations and gathered layers are whole."""

    def __init__(
        self,
        config: Mapping[str, Any],
        masters: Mapping[str, Tensor],
        rule: Rule,
        ranks: Ranks,
        store: Store,
        *,
        recompute: bool = False,
    ) -> None:
        """masters: float32, read one at a time, of which this rank keeps its parts. recompute: see `Policy`."""
        super().__init__(config, rule, ranks, store)
        shapes = parameter_shapes(dict(config))
        with torch.device("meta"):
            self._policy = Policy(config, shapes, recompute=recompute)
        mesh = init_device_mesh(ranks.device.type, (ranks.count,))
        for module in (*self._policy.layers, self._policy):
            # the outermost unit too is freed after forward: an evaluation would otherwise leave old weights in use
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
            assert isinstance(module, FSDPModule)
            # sums, which gloo and NCCL both have, in place of means
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        self._policy.to_empty(device=ranks.device)
        self._parameters = self._policy.named()
        for name, shape in shapes.items():
            local = _local(self._parameters[name])
            self.shards.append(shard_of(name, shape, rows_by_rank(shape, ranks.count), local))
        self.optimizer = ShardedOptimizer(self.shards, rule, ranks)
        self.load_weights(masters)

    def _score(self, batch: Batch, temperature: float, routing: bool) -> Scores:
        return as_scores(self._policy(batch, temperature, routing))

    def _backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def clear_gradients(self) -> None:
        """See Backend.clear_gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def _step(self, learning_rate: float, max_norm: float) -> float:
        for shard in self.shards:
            gradient = self._parameters[shard.name].grad
            master = shard.buffer.master
            shard.buffer.gradient = torch.zeros_like(master) if gradient is None else _local(gradient)
        return float(self.optimizer.step(learning_rate, max_norm))

    def _publish_masters(self) -> None:
        """Nothing to do: the parts in `shards` are those that are gathered."""


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, flat, in the same memory."""
    assert isinstance(tensor, DTensor)
    local: Tensor = tensor.to_local().detach()
    return local.view(-1)
