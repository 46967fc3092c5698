"""The backend of one device: every rank holds the whole model in the fused buffers of `trainer.parameters`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainer.averaging import COUNT, WeightAverage
from trainer.backends.base import AdamWRule, Future, Loss, Microbatch, Read, Rule, done
from trainer.data import make_batch
from trainer.model import Batch, Scores, score
from trainer.optimizers import AdamW, MuonWithAdamW, Optimizer
from trainer.parameters import Parameters
from trainer.ranks import ALONE, Ranks
from trainer.recipes import recipe_of
from trainer.state import NONE, TrainerState, capture_state
from trainer.together import together


class TorchBackend:
    """Gradients are summed over the ranks once a step, and every rank takes the same step.

    The passes of a rank may take longer than the ranks wait for a lost one.
    """

    def __init__(self, parameters: Parameters, rule: Rule, ranks: Ranks = ALONE) -> None:
        parameters = parameters.to(ranks.device)
        self.parameters, self.ranks, self._rule = parameters, ranks, rule
        self.config: Mapping[str, Any] = parameters.config
        for name, codes, scales in parameters.codes():
            recipe_of(parameters.config).keep(parameters.leaves[name], codes, scales)
        self._optimizer = _open_optimizer(parameters, rule)
        self._average: WeightAverage | None = None

    def forward(
        self, microbatches: Sequence[Microbatch], read: Read, temperature: float = 1.0, *, routing: bool = False
    ) -> Future[None]:
        """See Backend.forward."""
        with together(self.ranks):
            for number, members in enumerate(microbatches):
                batch = make_batch(members)
                with torch.no_grad():
                    scores = self._score(batch, temperature, routing)
                read(number, batch, scores)
        return done(None)

    def _score(self, batch: Batch, temperature: float, routing: bool) -> Scores:
        """Scores on the CPU."""
        there = batch.to(self.ranks.device)
        return score(self.parameters.leaves, self.config, there, temperature, routing=routing).to_cpu()

    def clear_gradients(self) -> None:
        """See Backend.clear_gradients."""
        self.parameters.clear_gradients()

    def forward_backward(
        self, microbatches: Sequence[Microbatch], loss: Loss, temperature: float = 1.0, *, routing: bool = False
    ) -> Future[None]:
        """See Backend.forward_backward."""
        with together(self.ranks):
            for number, members in enumerate(microbatches):
                batch = make_batch(members)
                scores = self._score(batch, temperature, routing)
                loss(number, batch, scores).backward()  # type: ignore[no-untyped-call]
        return done(None)

    def optim_step(self, learning_rate: float, max_norm: float) -> Future[float]:
        """See Backend.optim_step."""
        self.ranks.add(*(buffer.gradient for buffer in self.parameters.buffers))
        norm = self.parameters.clip_gradients(max_norm)
        self._optimizer.step(learning_rate)
        self.parameters.requantize()
        return Future(lambda: float(norm))

    def average_weights(self) -> Future[None]:
        """See Backend.average_weights."""
        self._average = self._average or WeightAverage(self.parameters.buffers)
        self._average.add()
        return done(None)

    def use_average(self) -> Future[None]:
        """See Backend.use_average."""
        assert self._average is not None, "average_weights was called"
        self._average.replace_masters()
        self.parameters.requantize()
        return done(None)

    def get_weights(self) -> Future[Parameters]:
        """See Backend.get_weights."""
        return done(self.parameters)

    def load_weights(self, masters: Mapping[str, Tensor]) -> Future[None]:
        """See Backend.load_weights."""
        with torch.no_grad():
            for name, own in self.parameters.masters():
                own.copy_(masters[name])
        self.parameters.requantize()
        return done(None)

    def save(
        self,
        step: int,
        extra: dict[str, Any],
        replicated: Mapping[str, Tensor],
        *,
        optimizer: bool = True,
        loop: Mapping[str, Tensor] = NONE,
    ) -> Future[TrainerState]:
        """See Backend.save. The tensors are shared, not copied."""
        if not optimizer:
            return done(replace(capture_state(self.parameters, replicated, "none", step, extra), loop=loop))
        mean = self._average.state() if self._average is not None else {}
        tensors = self._optimizer.state() | mean | dict(replicated)
        return done(replace(capture_state(self.parameters, tensors, self._rule.name, step, extra), loop=loop))

    def restore(self, state: TrainerState) -> Future[None]:
        """See Backend.restore."""
        if state.optimizer_name == self._rule.name:
            self._optimizer.load(state.optimizer)
            if COUNT in state.optimizer:
                self._average = WeightAverage(self.parameters.buffers)
                self._average.load(state.optimizer)
        return done(None)


def _open_optimizer(parameters: Parameters, rule: Rule) -> Optimizer:
    if isinstance(rule, AdamWRule):
        return AdamW(parameters.buffers, rule.beta1, rule.beta2, rule.weight_decay)
    return MuonWithAdamW(parameters, rule.adamw_share, rule.muon_share)
