"""Probe sequences, with log probabilities of a checkpoint by the built-in engine's forward pass.

A server must return the same values: differences reveal errors in its weights, kernels or loading. Sequences are drawn
until every expert of every layer has processed a token.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from inference.engines.kv import KvCache
from inference.engines.model import Rotary, forward, logits_of, make_batch
from inference.engines.weights import Weights, read_weights

LENGTH, AT_ONCE, ROUNDS = 48, 4, 16
FEWEST = 4
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probe:
    """One probe sequence."""

    token_ids: list[int]
    logprobs: list[float]
    """Log probability of each token given the previous ones, at temperature 1; 0.0 at index 0."""


def make_probes(directory: Path) -> list[Probe]:
    """Probes of a checkpoint; deterministic.

    Logs experts that random tokens never reach: only the comparison of their layer covers them.
    """
    weights = read_weights(directory)
    shape, random = weights.architecture, torch.Generator().manual_seed(0)
    length = min(LENGTH, shape.max_positions - 1)
    unseen = torch.ones(shape.layers, shape.experts, dtype=torch.bool)
    kept: list[Probe] = []
    for _ in range(ROUNDS):
        tokens = torch.randint(shape.vocabulary, (AT_ONCE, length), generator=random)
        logprobs, routes = score_rows(weights, tokens)
        for row, scored, chosen in zip(tokens, logprobs, routes, strict=True):
            reached = torch.zeros_like(unseen).scatter_(1, chosen.flatten(1), True)
            if len(kept) < FEWEST or bool((reached & unseen).any()):
                kept.append(Probe(row.tolist(), [0.0, *scored.tolist()]))
                unseen &= ~reached
        if not bool(unseen.any()):
            return kept
    places = ", ".join(f"layer {layer} expert {expert}" for layer, expert in unseen.nonzero()[:4].tolist())
    _log.warning("no probe reaches %d expert(s) of %s, e.g. %s", int(unseen.sum()), directory, places)
    return kept


def difference(probes: Sequence[Probe], scored: Sequence[Sequence[float]], tolerance: float) -> str:
    """How a server's log probabilities differ from those of the probes by more than `tolerance` nats; "" if they
    don't.
    """
    gaps = [
        abs(served - wanted)
        for probe, found in zip(probes, scored, strict=True)
        for served, wanted in zip(found, probe.logprobs, strict=True)
    ]
    finite = sum(map(math.isfinite, gaps))
    if finite < len(gaps):
        return f"log-probabilities of probes are not finite ({len(gaps) - finite} of {len(gaps)} tokens)"
    worst = max(gaps, default=0.0)
    if worst > tolerance:
        share = sum(gap > tolerance for gap in gaps) / len(gaps)
        return (
            f"log-probabilities of probes differ by up to {worst:.2g} ({share:.0%} of the tokens by more than"
            f" {tolerance:g})"
        )
    _log.info("%d probes agree to %.1e", len(probes), worst)
    return ""


@torch.inference_mode()
def score_rows(weights: Weights, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N, length - 1] and chosen experts [N, layers, length, experts_per_token] of token rows [N,
    length]. A dense model chooses none: [N, layers, length, 0].
    """
    shape, (count, length) = weights.architecture, tokens.shape
    cache = KvCache(shape)
    cache.reserve(count, length + 8)
    routes: list[Tensor] = []
    batch = make_batch(0, list(tokens.numpy()), np.zeros(count, np.int64))
    hidden = forward(weights, cache, Rotary(shape), batch, routes)[: count * length]
    logprobs = logits_of(weights, hidden).log_softmax(-1).view(count, length, -1)
    routes = routes or [torch.empty(count * length, 0, dtype=torch.int64)] * shape.layers
    chosen = torch.stack([route[: count * length].view(count, length, shape.experts_per_token) for route in routes], 1)
    return logprobs[:, :-1].gather(2, tokens[:, 1:, None])[..., 0], chosen
