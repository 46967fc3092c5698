"""Interface of all engines: token ids in; token ids, log probabilities and the policy version of each out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from contracts.routing import Routes

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """Parameters for sampling one completion."""

    temperature: float
    """0 is greedy; else logits are divided by it. Logprobs are those of the sampling distribution, or of temperature 1
    if greedy.
    """
    max_tokens: int
    """Maximum tokens to generate, at least 1."""
    seed: int
    """The random number of the token at absolute position p depends only on (seed, p), never on the batch."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the completion and keeps it as the last token."""
    routing_from: int | None = None
    """First position of the context whose chosen experts are returned, at most the prompt's length. None: none are."""


@dataclass(frozen=True)
class Completion:
    """Sampled tokens of one request."""

    token_ids: list[int]
    """New tokens only, including the stop token."""
    logprobs: list[float]
    """One per token, natural logarithm, float32 values."""
    spans: list[tuple[str, int, int]]
    """(policy version, start, end) within `token_ids`, contiguous and complete; more than one after a hot reload."""
    finish_reason: FinishReason
    routed_experts: Routes | None = field(default=None, compare=False)
    """Experts chosen at each position from `routing_from` to the last but one, since the last token was not fed. None
    unless requested, and from engines that do not return them.
    """


class Engine(Protocol):
    """Serves a policy. Safe to call from many tasks of one event loop; canceling a call frees its resources."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Continue `prompt_ids`.

        Raises RequestTooLong if the prompt leaves no room for a token. A full context ends the completion with
        "length".
        """

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-probability of each token given the previous ones; index 0 is 0.0. temperature: above 0."""

    async def load_weights(self, directory: Path, version: str) -> None:
        """Serve the checkpoint in `directory` from now on. Requests in flight continue; their later tokens have
        `version`.
        """

    async def version(self) -> str:
        """Policy version of the next token."""

    async def close(self) -> None:
        """Stop serving; requests in flight end with "abort". Idempotent."""
