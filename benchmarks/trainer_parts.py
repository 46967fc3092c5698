"""Seconds of a training job by part: attention, experts, output head, loss, optimizer, requantizing, data.

One clock runs all the time, and always for one part, so the parts add up to the whole. Forward, a part's function
switches the clock. Backward, the gradient that arrives at a part's output does: autograd computes a CPU's backward pass
in one thread, from the last part to the first. The marks copy nothing and change no bit.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from contracts.errors import TriplaneError

OTHER = "other"
PARTS: tuple[tuple[str, str, str], ...] = (
    ("trainer.rl", "continue_backend", "reading"),
    ("trainer.rl", "read_experience", "reading"),
    ("trainer.backends.torch", "make_batch", "data"),
    ("torch.nn.functional", "embedding", "embedding"),
    ("trainer.model", "_attention", "residuals"),
    ("trainer.model", "_norm", "norms"),
    ("trainer.model", "_rotate", "rotation"),
    ("trainer.recipes.base.Recipe", "linear", "projections"),
    ("trainer.recipes.base.Recipe", "attend", "attention"),
    ("trainer.model", "_experts", "experts"),
    ("trainer.recipes.base.Recipe", "head", "head"),
    ("trainer.rl", "policy_loss", "loss"),
    ("torch.Tensor", "backward", "loss"),
    ("trainer.parameters.Parameters", "clip_gradients", "optimizer"),
    ("trainer.parameters.Parameters", "clear_gradients", "optimizer"),
    ("trainer.optimizers.AdamW", "step", "optimizer"),
    ("trainer.parameters.Parameters", "requantize", "requantizing"),
    ("trainer.rl", "_publish", "publishing"),
)
"""(module or class, function, part). Inner functions come out of the outer one's time."""


class PartClock:
    """Seconds by part. Forward and backward of a part are counted apart: `experts` and `experts backward`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._part, self._since = OTHER, time.perf_counter()

    def start(self) -> None:
        """Forget everything measured so far."""
        self.seconds = {}
        self._part, self._since = OTHER, time.perf_counter()

    def stop(self) -> dict[str, float]:
        """Seconds by part since `start`."""
        self.switch(OTHER)
        return dict(self.seconds)

    def switch(self, part: str) -> str:
        """Let the clock run for another part, and return the one before."""
        now = time.perf_counter()
        self.seconds[self._part] = self.seconds.get(self._part, 0.0) + now - self._since
        before, self._part, self._since = self._part, part, now
        return before

    def install(self) -> None:
        """Measure the functions of PARTS, in this process from now on.

        Raises TriplaneError for one that does not exist.
        """
        for place, name, part in PARTS:
            owner = _resolve(place)
            if not hasattr(owner, name):
                raise TriplaneError(f"benchmarks trainer: {place} has no {name}: correct PARTS in {__name__}")
            setattr(owner, name, self._timed(getattr(owner, name), part))

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def measured(*arguments: Any, **named: Any) -> Any:
            before = self.switch(part)
            try:
                return self._marked(function(*arguments, **named), part)
            finally:
                self.switch(before)

        return measured

    def _marked(self, result: Any, part: str) -> Any:
        if isinstance(result, tuple):
            return type(result)(self._marked(each, part) for each in result)
        if isinstance(result, Tensor) and result.requires_grad:
            return _Mark.apply(result, self, f"{part} backward")  # type: ignore[no-untyped-call]
        return result


class _Mark(torch.autograd.Function):
    """The tensor itself; its gradient's arrival switches the clock."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, clock: PartClock, part: str) -> Tensor:
        ctx.clock, ctx.part = clock, part
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.clock.switch(ctx.part)
        return gradients[0], None, None


def _resolve(place: str) -> Any:
    """The module or class called `place`."""
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError:
        module, _, name = place.rpartition(".")
        return getattr(importlib.import_module(module), name)
