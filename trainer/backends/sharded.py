"""What backends with sharded weights share: passes in step, and weights and state written by all ranks together.

Every forward and backward pass gathers weights, so all ranks must make the same number of them: a rank with fewer
microbatches passes an empty one, whose loss is 0. To be written, each tensor is gathered on one rank, in turn: no rank
holds more than its share of the whole tensors and the largest one.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from contracts.architectures import expert_names
from contracts.checkpoints import expected_tensors, is_quantized
from contracts.precision import Forward, exported_forward
from contracts.rank_parts import RankParts, in_step, stage_parts
from contracts.store import Store, scratch_directory
from contracts.tensor_files import Form
from contracts.tensor_parts import bytes_of, form_of
from trainer.adapters import AdaptedBase
from trainer.averaging import COUNT, WeightAverage
from trainer.backends.base import Future, Loss, Microbatch, Read, Rule, done
from trainer.backends.policy import EXPERTS, Shapes
from trainer.backends.shards import Shard, ShardedOptimizer, gather, owners_of, part_of, parts_of
from trainer.data import ScoredSequence, make_batch
from trainer.export import METADATA, GatheredAdapter, StagedWeights
from trainer.model import Batch, Scores
from trainer.parameters import quantize_stack
from trainer.precision import precision_of
from trainer.ranks import Ranks, losing_ranks
from trainer.state import LOOP, MASTER, NONE, TrainerState
from trainer.tensors import StagedTensors

_EMPTY = ScoredSequence(np.zeros(2, np.int64), np.ones(1, np.int64))
"""What a rank without further microbatches passes."""


class ShardedBackend(ABC):
    """Protocol `Backend`, except for what depends on the library."""

    def __init__(
        self, config: Mapping[str, Any], rule: Rule, ranks: Ranks, store: Store, base: AdaptedBase | None
    ) -> None:
        """base: what the trained adapter is beside; None: all weights are trained."""
        self.config, self.ranks, self._rule, self._store, self._base = config, ranks, rule, store, base
        self.shards: list[Shard] = []
        """Of what is trained."""
        self.optimizer: ShardedOptimizer
        self._average: WeightAverage | None = None

    @abstractmethod
    def _score(self, batch: Batch, temperature: float, routing: bool) -> Scores: ...

    @abstractmethod
    def _backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of `loss`. last: whether the step's backward passes end with this one."""

    @abstractmethod
    def clear_gradients(self) -> None:
        """See Backend.clear_gradients."""

    @abstractmethod
    def _step(self, learning_rate: float, max_norm: float) -> float: ...

    @abstractmethod
    def _publish_masters(self) -> None:
        """Make the forward pass use the masters in `shards`, which were replaced."""

    def forward(
        self, microbatches: Sequence[Microbatch], read: Read, temperature: float = 1.0, *, routing: bool = False
    ) -> Future[None]:
        """See Backend.forward."""
        with torch.no_grad(), losing_ranks(self.ranks):
            for number in range(self.ranks.largest(len(microbatches))):
                batch = make_batch(_members(microbatches, number))
                scores = self._score(batch.to(self.ranks.device), temperature, routing).to_cpu()
                if number < len(microbatches):
                    read(number, batch, scores)
        return done(None)

    def forward_backward(
        self, microbatches: Sequence[Microbatch], loss: Loss, temperature: float = 1.0, *, routing: bool = False
    ) -> Future[None]:
        """See Backend.forward_backward."""
        with losing_ranks(self.ranks):
            passes = self.ranks.largest(len(microbatches))
            for number in range(passes):
                batch = make_batch(_members(microbatches, number))
                scores = self._score(batch.to(self.ranks.device), temperature, routing).to_cpu()
                own = number < len(microbatches)
                self._backward(loss(number, batch, scores) if own else _nothing(scores), number == passes - 1)
        return done(None)

    def optim_step(self, learning_rate: float, max_norm: float) -> Future[float]:
        """See Backend.optim_step."""
        with losing_ranks(self.ranks):
            return done(self._step(learning_rate, max_norm))

    @torch.no_grad()
    def load_weights(self, masters: Mapping[str, Tensor]) -> Future[None]:
        """See Backend.load_weights. Reads one tensor at a time."""
        with losing_ranks(self.ranks):
            for shard in self.shards:
                shard.buffer.master.copy_(part_of(masters[shard.name], shard, self.ranks.rank))
            self._publish_masters()
        return done(None)

    def average_weights(self) -> Future[None]:
        """See Backend.average_weights."""
        self._average = self._average or WeightAverage([shard.buffer for shard in self.shards])
        self._average.add()
        return done(None)

    def use_average(self) -> Future[None]:
        """See Backend.use_average."""
        assert self._average is not None, "average_weights was called"
        self._average.replace_masters()
        with losing_ranks(self.ranks):
            self._publish_masters()
        return done(None)

    def restore(self, state: TrainerState) -> Future[None]:
        """See Backend.restore. Reads one tensor at a time."""
        if state.optimizer_name == self._rule.name:
            own = parts_of(state.optimizer, self.shards, self.ranks.rank)
            self.optimizer.load(own)
            if COUNT in own:
                self._average = WeightAverage([shard.buffer for shard in self.shards])
                self._average.load(own)
        return done(None)

    @torch.no_grad()
    def get_weights(self) -> Future[StagedWeights] | Future[GatheredAdapter]:
        """See Backend.get_weights. The codes and scales that the forward pass uses, or the adapter."""
        with losing_ranks(self.ranks):
            if self._base is not None:
                return done(GatheredAdapter(self.config, self._base, self._gather_factors()))
            held: dict[str, Tensor] = {}
            forward = exported_forward(dict(self.config))
            wholes = self._wholes([(shard, shard.buffer.master) for shard in self.shards])
            for shard, whole in zip(self.shards, wholes, strict=True):
                if whole is not None:
                    parts = exported(shard.name, whole.view(shard.shape), forward)
                    held |= {name: part.cpu() for name, part in parts.items()}
            staged = self._stage(held, expected_tensors(dict(self.config)), METADATA)
            return done(StagedWeights(self.config, staged))

    @torch.no_grad()
    def save(
        self,
        step: int,
        extra: dict[str, Any],
        replicated: Mapping[str, Tensor],
        *,
        optimizer: bool = True,
        loop: Mapping[str, Tensor] = NONE,
    ) -> Future[TrainerState]:
        """See Backend.save."""
        with losing_ranks(self.ranks):
            found: list[tuple[str, Shard, Tensor]] = [
                (f"{MASTER}{shard.name}", shard, shard.buffer.master) for shard in self.shards
            ]
            shared = dict(replicated) | {f"{LOOP}{name}": tensor for name, tensor in loop.items()}
            owners = owners_of(self.shards)
            for name, tensor in self._own_state().items() if optimizer else ():
                if (shard := owners(name)) is None:
                    shared[name] = tensor
                else:
                    found.append((name, shard, tensor))
            forms: dict[str, Form] = {name: ("F32", shard.shape) for name, shard, _ in found}
            forms |= {name: form_of(tensor) for name, tensor in shared.items()}
            held = dict(shared) if self.ranks.leads else {}
            wholes = self._wholes([(shard, part) for _, shard, part in found])
            for (name, shard, _), whole in zip(found, wholes, strict=True):
                if whole is not None:
                    held[name] = whole.view(shard.shape).cpu()
            staged = self._stage(held, forms, None)
            kind, recipe = self._rule.name if optimizer else "none", precision_of(self.config).kind
            return done(TrainerState({}, {}, kind, step, extra, recipe, staged=staged))

    def _gather_factors(self) -> dict[str, Tensor]:
        """All factors on rank 0, none on the others."""
        found: dict[str, Tensor] = {}
        for shard in self.shards:
            whole = gather(shard.buffer.master, shard, 0, self.ranks)
            if whole is not None:
                found[shard.name] = whole.view(shard.shape).cpu()
        return found

    def _own_state(self) -> dict[str, Tensor]:
        """This rank's parts of the state of optimizer and mean."""
        return self.optimizer.state() | (self._average.state() if self._average is not None else {})

    def _wholes(self, parts: Sequence[tuple[Shard, Tensor]]) -> Iterator[Tensor | None]:
        """The whole tensors, in order; None for those of other ranks."""
        owners = self.ranks.deal([math.prod(shard.shape) for shard, _ in parts])
        for (shard, part), owner in zip(parts, owners, strict=True):
            yield gather(part, shard, owner, self.ranks)

    def _stage(
        self, held: Mapping[str, Tensor], forms: Mapping[str, Form], metadata: Mapping[str, str] | None
    ) -> StagedTensors:
        """Write what this rank holds to its own disk. forms: of all ranks."""
        ranks, folder = self.ranks, scratch_directory(self._store)
        own = {name: form_of(tensor) for name, tensor in held.items()}

        def write() -> RankParts:
            return stage_parts(
                Path(folder.name), ranks.rank, ranks.count, own, lambda name: bytes_of(held[name]), metadata
            )

        return StagedTensors(self._store, ranks, folder, in_step(write, ranks.exchange, ranks.rank), forms)


def exported(name: str, master: Tensor, forward: Forward) -> dict[str, Tensor]:
    """Tensors of the exported layout of one parameter."""
    singles = expert_names(name, tuple(master.shape))
    stack = master.view(-1, *master.shape[-2:]) if master.dim() > 1 else master[None]
    if not (forward.quantized and is_quantized(name)):
        stored = stack.to(torch.bfloat16 if forward.activations == "bfloat16" else torch.float32)
        return dict(zip(singles, stored, strict=True))
    codes, scales = quantize_stack(stack, forward.power_of_two)
    found: dict[str, Tensor] = dict(zip(singles, codes, strict=True))
    return found | {f"{single}_scale_inv": each for single, each in zip(singles, scales, strict=True)}


def _members(microbatches: Sequence[Microbatch], number: int) -> Microbatch:
    """A microbatch of this rank, or an empty one after its last."""
    return microbatches[number] if number < len(microbatches) else [_EMPTY]


def _nothing(scores: Scores) -> Tensor:
    """A loss of 0 that reaches every parameter."""
    every = scores.logprobs.sum()
    if scores.routing is not None:
        every = every + scores.routing.probabilities.sum()
    return every * 0.0


def rows_by_rank(shape: tuple[int, ...], count: int) -> list[tuple[int, int]]:
    """Ranges of elements when the first dimension is cut as `torch.chunk` does."""
    height, width = -(-shape[0] // count), math.prod(shape[1:])
    ends = [min(height * rank, shape[0]) for rank in range(count + 1)]
    return [(start * width, end * width) for start, end in itertools.pairwise(ends)]


def ranges_by_rank(shape: tuple[int, ...], count: int, parts: int) -> list[tuple[int, int]]:
    """Ranges of elements that `count` ranks hold if consecutive ranks divide the first dimension into `parts`, and the
    ranks that have the same part divide it further.
    """
    size = math.prod(shape) // parts
    within = rows_by_rank((shape[0] // parts, *shape[1:]), count // parts)
    return [(part * size + start, part * size + end) for start, end in within for part in range(parts)]


def own_shapes(shapes: Shapes, expert_ranks: int) -> dict[str, tuple[int, ...]]:
    """Shapes of what one of the ranks computes with that divide the experts."""
    return {
        name: (shape[0] // expert_ranks, *shape[1:]) if EXPERTS in name else shape for name, shape in shapes.items()
    }
