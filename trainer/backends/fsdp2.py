"""FSDP2: torch's `fully_shard`, one unit for each layer and one for the rest.

Each parameter is cut along its first dimension: experts into whole experts, matrices into rows. A layer's masters are
gathered for its forward and again for its backward pass, and freed after each. Gradients are summed in float32 onto the
parts. With expert parallelism a layer's experts are a unit of their own, which is only gathered among the ranks that
compute the same experts; with as many expert ranks as ranks it never is.

Sources: arXiv:2304.11277 (FSDP), torch.distributed.fsdp.fully_shard (FSDP2).
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from contracts.adapters import factor_shapes
from contracts.architectures import parameter_shapes
from contracts.store import Store
from trainer.adapters import AdaptedBase
from trainer.backends.base import Rule
from trainer.backends.policy import EXPERTS, Layer, Policy, as_scores
from trainer.backends.sharded import ShardedBackend, own_shapes, ranges_by_rank
from trainer.backends.shards import Shard, ShardedOptimizer, part_of, shard_of
from trainer.config import require_divisor
from trainer.export import StoredLeaves
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
        base: AdaptedBase | None = None,
        recompute: bool = False,
        expert_ranks: int = 1,
    ) -> None:
        """masters: float32, read one at a time, of which this rank keeps its parts; with `base` the factors. recompute:
        see `Policy`. expert_ranks: consecutive ranks that divide each layer's experts.

        Raises TrainingConfigError if expert_ranks does not divide the number of experts.
        """
        super().__init__(config, rule, ranks, store, base)
        shapes, adapter = parameter_shapes(dict(config)), base.adapter if base is not None else None
        require_divisor(config.get("num_experts"), expert_ranks)
        kind = ranks.device.type
        near, far = ranks.divide(expert_ranks) if expert_ranks > 1 else (None, None)
        with torch.device("meta"):
            own = own_shapes(shapes, expert_ranks)
            self._policy = Policy(config, own, recompute=recompute, adapter=adapter, expert_group=near)
        mesh = init_device_mesh(kind, (ranks.count,))
        for layer in self._policy.layers:
            if far is not None and isinstance(layer, Layer) and layer.experts is not None:
                _shard(layer.experts, DeviceMesh.from_group(far, kind))
            _shard(layer, mesh)
        _shard(self._policy, mesh)
        self._policy.to_empty(device=ranks.device)
        self._parameters = self._policy.named()

        def shard(name: str, shape: tuple[int, ...]) -> Shard:
            ranges = ranges_by_rank(shape, ranks.count, expert_ranks if EXPERTS in name else 1)
            return shard_of(name, shape, ranges, _local(self._parameters[name]))

        if base is not None:
            leaves = StoredLeaves(base.checkpoint.directory(), config)
            with torch.no_grad():
                for frozen in itertools.starmap(shard, shapes.items()):
                    frozen.buffer.master.copy_(part_of(leaves[frozen.name], frozen, ranks.rank))
        trained = shapes if base is None else factor_shapes(config, base.adapter)
        self.shards = list(itertools.starmap(shard, trained.items()))
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


def _shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make the module a unit whose parameters are divided among the ranks of `mesh`, and its gradients summed."""
    # the outermost unit too is freed after forward: an evaluation would otherwise leave old weights in use
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
    assert isinstance(module, FSDPModule)
    # sums, which gloo and NCCL both have, in place of means
    module.set_force_sum_reduction_for_comms(True)
    module.set_gradient_divide_factor(1.0)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, flat, in the same memory."""
    assert isinstance(tensor, DTensor)
    local: Tensor = tensor.to_local().detach()
    return local.view(-1)
