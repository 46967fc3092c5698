"""Sampling from part of the vocabulary: what a grammar and `top_p` leave of it, and the record of that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from contracts.supports import Mask, Supports, SupportsWriter
from inference.engines.sampling import divided, scaled_logprobs
from inference.errors import EngineError
from inference.grammar.matcher import Matcher, only_token


class Drawn(NamedTuple):
    """What tokens were drawn from."""

    supports: Mask
    """bool [N, vocabulary]."""
    log_mass: npt.NDArray[np.float32]
    """[N] log of each support's probability under the whole distribution, at most 0."""

    def between(self, first: int, last: int) -> Drawn:
        """Of the tokens [first, last) alone."""
        return Drawn(self.supports[first:last], self.log_mass[first:last])


class Restriction:
    """Of one request: its grammar's state, and the supports of its tokens so far."""

    def __init__(self, matcher: Matcher | None, top_p: float, begun: Sequence[int] = ()) -> None:
        """begun: tokens that the grammar begins with. Raises EngineError if they do not follow it, and for a grammar
        that no token can continue, or that takes too long to follow.
        """
        self.top_p = top_p
        self._matcher = matcher
        self._writer = SupportsWriter()
        self._forced: list[bool] = []
        self._log_mass: list[float] = []
        self.mask: Mask | None = None
        """bool [vocabulary]: tokens that the grammar allows next; None: all."""
        if matcher is not None:
            for token in begun:
                mask = matcher.mask()
                if mask is not None and not mask[token]:
                    raise EngineError(f"token {token} at the prompt's end is not one that the grammar begins with")
                matcher.accept(token)
                matcher.check_cost()
        if not self._look():
            raise EngineError("no token of the policy's vocabulary can begin the grammar: is it of another tokenizer?")

    def try_token(self, token: int) -> bool:
        """Go on after a guessed token, as far as `take`. False if the grammar allows no token after it."""
        if self._matcher is None:
            return True
        before = self.mask
        self._matcher.accept(token)
        if self._look():
            return True
        self._matcher.rollback(1)
        self.mask = before
        return False

    def take(self, sampled: list[int], tried: int, drawn: Drawn, masks: list[Mask | None], ended: bool) -> None:
        """Go on after sampled tokens, which agree with all but the last of the `tried` ones.

        drawn, masks: of each, what it was drawn from, and what the grammar alone allowed. ended: whether the last token
        ends the completion. Raises EngineError if the grammar allows no token after it, or takes too long to follow.
        """
        self._log_mass += drawn.log_mass.tolist()
        for support, mask in zip(drawn.supports, masks, strict=True):
            self._writer.add(support)
            self._forced.append(only_token(mask) is not None)
        if self._matcher is None:
            return
        if spare := tried + 1 - len(sampled):
            self._matcher.rollback(spare)
        self._matcher.accept(sampled[-1])
        if ended:
            return
        self._matcher.check_cost()
        if not self._look():
            raise EngineError(
                f"the grammar allows no token of the policy's vocabulary after {sampled[-1]}: make it one that the"
                " tokenizer can write"
            )

    def records(self, first: int = 0) -> tuple[Supports, list[bool] | None, list[float]]:
        """Supports, `forced` and `log_mass` of the tokens from place `first` on, as those of a completion."""
        forced, found = self._forced[first:], self._writer.supports()
        supports = found.between(first, len(self._forced)) if first else found
        return supports, forced if any(forced) else None, self._log_mass[first:]

    def _look(self) -> bool:
        """Set `mask`. Returns whether any token is allowed."""
        self.mask = None if self._matcher is None else self._matcher.mask()
        return self.mask is None or bool(np.count_nonzero(self.mask))


def restrict(
    logits: Tensor, temperatures: npt.NDArray[np.float32], masks: list[Mask | None], top_ps: npt.NDArray[np.float64]
) -> tuple[Tensor, Mask]:
    """Logits [N, V] with -inf outside each row's support, and the supports, bool [N, V].

    masks, top_ps: N each. The nucleus is taken of the distribution that the mask leaves, after temperature; of equal
    probabilities, the lower ids come first. Source: Holtzman et al., 2019 (arXiv:1904.09751).
    """
    allowed = torch.ones(logits.shape, dtype=torch.bool)
    for row, mask in enumerate(masks):
        if mask is not None:
            allowed[row] = torch.from_numpy(mask)
    logits = logits.masked_fill(~allowed, -torch.inf)
    rows = np.flatnonzero(top_ps < 1.0)
    if len(rows):
        some = torch.log_softmax(divided(logits[rows], temperatures[rows]), -1).double().exp()
        ranked, order = some.sort(dim=-1, descending=True, stable=True)
        before = ranked.cumsum(-1) - ranked
        kept = torch.zeros_like(some, dtype=torch.bool)
        kept.scatter_(1, order, before < torch.from_numpy(top_ps[rows])[:, None])
        allowed[rows] &= kept
        logits = logits.masked_fill(~allowed, -torch.inf)
    return logits, allowed.numpy()


def log_mass(
    whole: Tensor, temperatures: npt.NDArray[np.float32], tokens: Tensor, logprobs: Tensor
) -> npt.NDArray[np.float32]:
    """[N] log of the probability that tokens' supports have under the whole distribution, at most 0.

    whole: logits [N, V] before `restrict`. tokens, logprobs: [N] of those sampled after it. The difference of two log
    probabilities, with their error: an epsilon of float32 times the larger one, or of the largest logit.
    """
    unrestricted = scaled_logprobs(whole, temperatures).gather(1, tokens[:, None])[:, 0]
    return (unrestricted - logprobs).clamp(max=0).numpy()
