"""Output head: log probabilities of the scored tokens and entropies, in bounded memory.

A token that the sampler drew from part of the vocabulary (`contracts.supports`) is normalized over that part: the
gradient of the log probability over the whole vocabulary would be biased.

The plain path holds about four tensors of [scored, vocabulary] at once. `triplane_kernels.loss_head` holds few tiles of
16 MiB and computes the logits again in backward; on a GPU it runs as Triton kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from contracts.supports import WHOLE, Supports

LARGEST_LOGITS = 256 * 2**20
"""Bytes of logits up to which a CPU takes the plain path, whose bits existing runs have. The quickstart's largest are
25 MB: 8,192 tokens, vocabulary 768.
"""
Head = Callable[..., tuple[Tensor, Tensor]]
"""`target_scores` without dtype, or `trainer.recipes.base.Recipe.head`."""


@dataclass(frozen=True)
class SupportSets:
    """Supports of the scored tokens of a batch, in the form of `contracts.supports.Supports`."""

    numbers: Tensor
    """int64 [scored]: index into the sets, or WHOLE."""
    sizes: Tensor
    """int64 [sets]: number of each set's `ids`."""
    left_out: Tensor
    """bool [sets]: whether a set's `ids` are those that it leaves out, instead of its members."""
    ids: Tensor
    """int64: token ids of all sets end to end."""

    @classmethod
    def of(cls, supports: Supports) -> SupportSets:
        """The same supports as tensors."""
        numbers, sizes, ids = (
            torch.from_numpy(each).long() for each in (supports.numbers, supports.sizes, supports.ids)
        )
        return cls(numbers, sizes, torch.from_numpy(supports.left_out), ids)

    def to(self, device: torch.device) -> SupportSets:
        """The supports on `device`."""
        return SupportSets(*(each.to(device) for each in (self.numbers, self.sizes, self.left_out, self.ids)))

    def masks(self, numbers: Tensor, vocabulary: int) -> Tensor:
        """bool [numbers, vocabulary]: the members of the sets with these numbers, none of which is WHOLE."""
        sizes, left_out = self.sizes[numbers], self.left_out[numbers]
        rows = torch.repeat_interleave(sizes)
        within = torch.arange(len(rows), device=rows.device) - (sizes.cumsum(0) - sizes)[rows]
        starts = (self.sizes.cumsum(0) - self.sizes)[numbers]
        masks = left_out[:, None].repeat(1, vocabulary)
        masks[rows, self.ids[starts[rows] + within]] = ~left_out[rows]
        return masks


def scores_over_supports(
    head: Head, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, supports: SupportSets | None
) -> tuple[Tensor, Tensor]:
    """`head`, with the tokens that have a support normalized over it: log p(target) = logit - log sum exp over the set.

    The other tokens have the bits that they have without supports, since `head` is called with the same operands. Masks
    are made, and made again in backward, for a part of the tokens at a time. hidden, weight, targets, temperature and
    the results: as in `target_scores`.
    """
    if supports is None:
        return head(hidden, weight, targets, temperature)
    places = (supports.numbers != WHOLE).nonzero().squeeze(1)
    size = _rows_at_once(weight)

    def scores(rows: Tensor, weight: Tensor, wanted: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        return head(rows, weight, wanted, temperature, allowed=supports.masks(numbers, len(weight)))

    columns = (torch.split(each[places], size) for each in (hidden, targets, supports.numbers))
    parts = [
        scores(rows, weight, wanted, numbers)
        if len(places) <= size
        else checkpoint(scores, rows, weight, wanted, numbers, use_reentrant=False, preserve_rng_state=False)
        for rows, wanted, numbers in zip(*columns, strict=True)
    ]
    logprobs, entropies = (torch.cat(each) for each in zip(*parts, strict=True))
    if len(places) == len(hidden):
        return logprobs, entropies
    every, spread = head(hidden, weight, targets, temperature)
    return every.index_copy(0, places, logprobs), spread.index_copy(0, places, entropies)


def target_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    dtype: torch.dtype | None = None,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log probability of each target and entropy of each distribution, both float32 [scored], in nats.

    hidden [scored, width] and weight [vocabulary, width] have one dtype; targets int64 [scored]. The distribution is
    softmax(hidden @ weight.T / temperature). Log probabilities are differentiable in hidden and weight; entropies carry
    no gradient. Both paths agree to float32's rounding.

    dtype: bfloat16 rounds hidden, weight and logits to it, as a head of that dtype in an engine does; the softmax stays
    float32. Sums are float64 on a CPU: see `trainer.recipes.base`.

    allowed: bool [scored, vocabulary], the tokens that each distribution is over, the target among them; None: all.
    """
    if dtype is not None and dtype != hidden.dtype:
        return _narrow_scores(hidden, weight, targets, temperature, dtype, allowed)
    if hidden.is_cuda or len(hidden) * len(weight) * hidden.element_size() > LARGEST_LOGITS:
        # Imported here: it takes a quarter of a second, and small models never need it.
        from triplane_kernels.loss_head import loss_head

        logprobs, entropy = loss_head(hidden, weight, targets, temperature=temperature, allowed=allowed)
        return logprobs, entropy.detach()
    return _from_logits(F.linear(hidden, weight), targets, temperature, allowed)


def _narrow_scores(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, dtype: torch.dtype, allowed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`target_scores` with rounded logits, computed again in backward a part of the rows at a time.

    With `allowed` there is one part, since `scores_over_supports` has cut the rows.
    """
    narrow = weight.to(dtype)

    def scores(rows: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        operands = rows.to(dtype), narrow
        wide = operands if rows.is_cuda else tuple(operand.double() for operand in operands)
        return _from_logits(F.linear(*wide).to(dtype).float(), wanted, temperature, allowed)

    size = _rows_at_once(weight)
    if len(hidden) <= size or allowed is not None:
        return scores(hidden, targets)
    parts = [
        checkpoint(scores, rows, wanted, use_reentrant=False, preserve_rng_state=False)
        for rows, wanted in zip(torch.split(hidden, size), torch.split(targets, size), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _rows_at_once(weight: Tensor) -> int:
    """Rows whose float32 logits have at most LARGEST_LOGITS bytes, at least 1."""
    return max(1, LARGEST_LOGITS // (len(weight) * 4))


def _from_logits(logits: Tensor, targets: Tensor, temperature: float, allowed: Tensor | None) -> tuple[Tensor, Tensor]:
    if temperature != 1.0:
        logits = logits / temperature
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    every = F.log_softmax(logits, dim=-1)
    logprobs = every.gather(1, targets[:, None]).squeeze(1)
    with torch.no_grad():
        if allowed is not None:
            every = every.masked_fill(~allowed, 0.0)  # 0 x -inf is not a number
        entropy = -(every.exp() * every).sum(-1)
    return logprobs, entropy
