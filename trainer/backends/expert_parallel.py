"""Expert parallelism: each rank computes some of a layer's experts, for its own tokens and for those of other ranks.

    rows by expert --all-to-all--> rows for this rank's experts --mixture--> results --all-to-all--> weighted sums

Source: arXiv:2006.16668 (GShard), section 3.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trainer.recipes.base import Experts, Recipe, by_expert


def exchanged_mixture(
    recipe: Recipe, rows: Tensor, shares: Tensor, chosen: Tensor, experts: Experts, group: dist.ProcessGroup
) -> Tensor:
    """`Recipe.mixture` over the experts of all ranks of `group`, of which `experts` are this rank's, in rank order.

    Every rank must call it, and run its backward pass, equally often. Each result is rounded before it is weighted, so
    with recipe fp32 and w8 the numbers are those of one rank up to the rounding of sums.
    """
    ranks, own, picks = group.size(), len(experts.gate), chosen.shape[1]
    order, back = by_expert(chosen)
    sent = torch.bincount(chosen.reshape(-1), minlength=ranks * own)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    counts = torch.stack([each.view(ranks, own).sum(1) for each in (received, sent)]).tolist()
    there = _Exchange.apply(rows[order // picks], *counts, group)  # type: ignore[no-untyped-call]
    # each sender's rows are in the order of the experts
    expert = torch.arange(own, device=chosen.device).repeat(ranks).repeat_interleave(received)
    rows_there = len(there)
    if not rows_there:  # a row of zeros, so that no kernel starts on nothing and every expert gets a gradient
        there, expert = F.pad(there, (0, 0, 0, 1)), expert.new_zeros(1)
    done = recipe.mixture(there, shares.new_ones((len(there), 1)), expert[:, None], experts)[:rows_there]
    here = _Exchange.apply(done, *reversed(counts), group)  # type: ignore[no-untyped-call]
    return recipe.narrow((here[back].view(*chosen.shape, rows.shape[1]) * shares[..., None]).sum(1))


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; in backward the gradients return."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = sent, received, group
        found = rows.new_empty((sum(received), rows.shape[1]))
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Exchange.apply(gradients[0], *ctx.back), None, None, None  # type: ignore[no-untyped-call]
