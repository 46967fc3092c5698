"""Mean of the weights over the last optimizer steps (stochastic weight averaging, arXiv:1803.05407)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.parameters import Buffer

COUNT = "average.count"


class WeightAverage:
    """Running mean, in float32, of the masters of `buffers` as they were at each `add`."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = list(buffers)
        self._count = 0
        self._means = [torch.zeros_like(buffer.master) for buffer in buffers]

    @torch.no_grad()
    def add(self) -> None:
        """Take the present masters into the mean."""
        self._count += 1
        for mean, buffer in zip(self._means, self._buffers, strict=True):
            mean.add_(buffer.master - mean, alpha=1 / self._count)

    @torch.no_grad()
    def replace_masters(self) -> None:
        """Set the masters to the mean."""
        for mean, buffer in zip(self._means, self._buffers, strict=True):
            buffer.master.copy_(mean)

    def state(self) -> dict[str, Tensor]:
        """`average.count` and, for each parameter, `average.<name>`; empty before the first `add`."""
        if not self._count:
            return {}
        found = {COUNT: torch.tensor(float(self._count))}
        for mean, buffer in zip(self._means, self._buffers, strict=True):
            found |= {f"average.{name}": buffer.view(mean, name) for name in buffer.spans}
        return found

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state` returned."""
        if COUNT not in state:
            return
        self._count = int(state[COUNT])
        for mean, buffer in zip(self._means, self._buffers, strict=True):
            for name in buffer.spans:
                buffer.view(mean, name).copy_(state[f"average.{name}"])
