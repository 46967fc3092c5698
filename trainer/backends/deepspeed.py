"""DeepSpeed's ZeRO: stage 1 divides the optimizer's state among the ranks, 2 also the gradients, 3 also the weights.

DeepSpeed moves weights and gradients; the optimizer is `shards.ShardedOptimizer`, over the one flat partition that
DeepSpeed gives each rank. So all stages, and all backends, apply the same formulas and save the same state, by
parameter. With expert parallelism each rank trains its experts itself, beside DeepSpeed, which has all other weights.

Source: arXiv:1910.02054 (ZeRO).
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from contracts.adapters import factor_shapes
from contracts.architectures import parameter_shapes
from contracts.store import Store
from trainer.adapters import AdaptedBase
from trainer.backends.base import Rule
from trainer.backends.policy import EXPERTS, Policy, Shapes, as_scores
from trainer.backends.sharded import ShardedBackend, own_shapes, ranges_by_rank
from trainer.backends.shards import Shard, ShardedOptimizer, shard_of
from trainer.config import require_divisor
from trainer.errors import TrainingConfigError
from trainer.export import StoredLeaves
from trainer.model import Batch, Scores
from trainer.plan.sharded import REDUCE_BUCKET
from trainer.ranks import Ranks

WHOLE = 10**15
"""Elements: above any model, so that ZeRO 3 keeps all parameters in one partition."""


class DeepSpeedBackend(ShardedBackend):
    """ZeRO 1 and 2 hold the whole weights on every rank besides the sharded masters; ZeRO 3 holds its part alone."""

    def __init__(
        self,
        config: Mapping[str, Any],
        masters: Mapping[str, Tensor],
        rule: Rule,
        ranks: Ranks,
        store: Store,
        *,
        stage: int,
        base: AdaptedBase | None = None,
        recompute: bool = False,
        expert_ranks: int = 1,
    ) -> None:
        """masters: float32, read one at a time; with `base` the factors. stage: 1 to 3. recompute: see `Policy`.
        expert_ranks: 1, or at stages 1 and 2 all ranks, which then divide each layer's experts.

        Raises TrainingConfigError if DeepSpeed is not installed, or has nothing to train.
        """
        super().__init__(config, rule, ranks, store, base)
        self._zero, self._norm = stage, float("nan")
        self._request: tuple[float, float] | None = None
        self._pending = False
        """Whether DeepSpeed holds gradients that no step has applied."""
        shapes, adapter = parameter_shapes(dict(config)), base.adapter if base is not None else None
        trained = shapes if adapter is None else factor_shapes(config, adapter)
        frozen = StoredLeaves(base.checkpoint.directory(), config) if base is not None else {}
        require_divisor(config.get("num_experts"), expert_ranks)
        group = ranks.divide(expert_ranks)[0] if expert_ranks > 1 else None
        own = own_shapes(shapes, expert_ranks)
        policy = Policy(config, own, recompute=recompute, adapter=adapter, expert_group=group)
        policy.to(ranks.device)
        self._parameters = policy.named()
        self._apart = {name for name in self._parameters if group is not None and EXPERTS in name}
        """What this rank trains beside DeepSpeed."""
        managed = {name: shape for name, shape in trained.items() if name not in self._apart}
        if not managed:
            raise TrainingConfigError(
                "backend deepspeed has nothing to train beside the experts: add a projection of the attention to"
                " trainer.lora.targets, or set trainer.launcher.backend to fsdp2"
            )

        def whole(name: str) -> Tensor:
            return masters[name] if name in trained else frozen[name]

        self._fill(self._parameters.keys() - self._apart, whole)
        self._engine = _engine(policy, [self._parameters[name] for name in managed], stage, self._apply, ranks.device)
        self._fill(self._apart, whole)  # DeepSpeed has given every rank those of rank 0
        self._flat: Tensor
        self._places: dict[str, tuple[int, int]] = {}
        """Start and end of each parameter's part in this rank's partition."""
        cut = self._cut(managed)
        for name in self._apart & trained.keys():
            ranges = ranges_by_rank(trained[name], ranks.count, expert_ranks)
            cut[name] = shard_of(name, trained[name], ranges, self._parameters[name].detach().view(-1))
        self.shards = [cut[name] for name in trained]
        self.optimizer = ShardedOptimizer(self.shards, rule, ranks)

    @torch.no_grad()
    def _fill(self, names: Iterable[str], whole: Callable[[str], Tensor]) -> None:
        """Copy parameters, or this rank's part of them, from whole ones."""
        for name in names:
            found = whole(name)
            part = found.chunk(self.ranks.count)[self.ranks.rank] if name in self._apart else found
            self._parameters[name].copy_(part)

    def _cut(self, shapes: Shapes) -> dict[str, Shard]:
        """Shards of the parameters with these shapes, which DeepSpeed holds in one partition, `_flat`."""
        zero, count = self._engine.optimizer, self.ranks.count
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        if self._zero == 3:
            order = [names[id(parameter)] for group in zero.fp16_groups for parameter in group]
            flat, starts = zero.fp32_partitioned_groups_flat, []
        else:
            order = [names[id(parameter)] for parameter in zero.round_robin_bit16_groups[0]]
            flat, starts = zero.single_partition_of_fp32_groups, zero.round_robin_bit16_offsets[0]
        assert len(flat) == 1 and len(order) == len(shapes), "all parameters of DeepSpeed are in one partition"
        self._flat = flat[0]
        sizes = {name: math.prod(shapes[name]) for name in order}
        layout = _layout_3(sizes, count) if self._zero == 3 else _layout_1(sizes, starts, len(self._flat), count)
        ranges, offsets = layout
        found = {}
        for name in order:
            start, end = ranges[name][self.ranks.rank]
            at = offsets[name][self.ranks.rank]
            self._places[name] = at, at + end - start
            found[name] = shard_of(name, shapes[name], ranges[name], self._flat.detach()[at : at + end - start])
        return found

    def _score(self, batch: Batch, temperature: float, routing: bool) -> Scores:
        return as_scores(self._engine(batch, temperature, routing))

    def _backward(self, loss: Tensor, last: bool) -> None:
        self._pending = True
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed applies the mean over the ranks
        self._engine.backward(loss * self.ranks.count)

    def clear_gradients(self) -> None:
        """See Backend.clear_gradients."""
        if self._pending:  # a step without request applies nothing and drops them
            self._pending = False
            self._engine.step()

    def _step(self, learning_rate: float, max_norm: float) -> float:
        self._request, self._norm, self._pending = (learning_rate, max_norm), float("nan"), False
        self._engine.step()
        return self._norm

    def _apply(self) -> None:
        """Take the step that `_step` asked for, on the partition's gradient. DeepSpeed calls this."""
        if self._request is not None:  # else DeepSpeed is starting, or drops gradients
            (rate, limit), self._request = self._request, None
            for shard in self.shards:
                shard.buffer.gradient = self._gradient(shard)
            self._norm = float(self.optimizer.step(rate, limit))
        for name in self._apart:
            self._parameters[name].grad = None

    def _gradient(self, shard: Shard) -> Tensor:
        """Of this rank's part, summed over the ranks."""
        if shard.name in self._apart:
            own = self._parameters[shard.name].grad
            return torch.zeros_like(shard.buffer.master) if own is None else own.view(-1) / self.ranks.count
        start, end = self._places[shard.name]
        assert self._flat.grad is not None
        return self._flat.grad[start:end]

    @torch.no_grad()
    def _publish_masters(self) -> None:
        if self._zero == 3:  # the partition is what is gathered
            return
        zero = self._engine.optimizer
        zero.parallel_partitioned_bit16_groups[0][self.ranks.rank].copy_(self._flat)
        whole = zero.bit16_groups_flat[0]
        torch.distributed.all_gather(list(whole.chunk(self.ranks.count)), self._flat.detach())


class _Step(torch.optim.Optimizer):
    """The optimizer that DeepSpeed drives: calls `apply` in place of a rule of its own."""

    def __init__(self, parameters: list[torch.nn.Parameter], apply: Callable[[], None]) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self._apply = apply

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """See torch.optim.Optimizer.step."""
        self._apply()


def _engine(
    policy: Policy, parameters: list[torch.nn.Parameter], stage: int, apply: Callable[[], None], device: torch.device
) -> Any:
    """DeepSpeed's engine over the process group of `trainer.ranks`."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))
    try:
        import deepspeed
        import deepspeed.ops
    except ImportError:
        raise TrainingConfigError(
            "backend deepspeed: the package deepspeed is not installed: run `pip install 'triplane[deepspeed]'`, or set"
            " trainer.launcher.backend to fsdp2"
        ) from None
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Its sums through shared memory wait for a dead or hung rank for ever, and are compiled for half a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": WHOLE,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "sub_group_size": WHOLE,
            "stage3_param_persistence_threshold": 0,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": REDUCE_BUCKET,
        },
    }
    engine, *_ = deepspeed.initialize(
        model=policy, optimizer=_Step(parameters, apply), config=settings, dist_init_required=False
    )
    return engine


Layout = tuple[dict[str, list[tuple[int, int]]], dict[str, list[int]]]
"""By parameter and rank: range of its elements, and where the range begins in the rank's partition."""


def _layout_1(sizes: Mapping[str, int], starts: list[int], partition: int, count: int) -> Layout:
    """ZeRO 1 and 2: all parameters end to end, cut into partitions of equal size. starts: where each one begins."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    offsets: dict[str, list[int]] = {}
    for (name, size), start in zip(sizes.items(), starts, strict=True):
        cuts = [min(max(partition * rank - start, 0), size) for rank in range(count + 1)]
        ranges[name] = list(itertools.pairwise(cuts))
        offsets[name] = [start + first - partition * rank for rank, (first, _) in enumerate(ranges[name])]
    return ranges, offsets


def _layout_3(sizes: Mapping[str, int], count: int) -> Layout:
    """ZeRO 3: every parameter is cut into parts of equal size, of which the last ones may be shorter."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    offsets: dict[str, list[int]] = {}
    start = 0
    for name, size in sizes.items():
        height = -(-size // count)
        cuts = [min(height * rank, size) for rank in range(count + 1)]
        ranges[name] = list(itertools.pairwise(cuts))
        offsets[name] = [start] * count
        start += height
    return ranges, offsets
