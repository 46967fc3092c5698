"""Interface of all engines: token ids in; token ids, log probabilities and the policy version of each out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class SamplingParams:
    """Parameters for sampling one completion."""

    temperature: float
    """0 is greedy; else logits are divided by it. Logprobs are those of the distribution really sampled from; greedy
    ones of temperature 1.
    """
    max_tokens: int
    """Tokens to generate at most, at least 1."""
    seed: int
    """The random number of the token at absolute position p of a sequence depends on (seed, p) only, never on the
    batch.
    """
    stop_token_ids: tuple[int, ...] = ()
    """Sampling any of these ends the completion; it is kept as the last token."""


@dataclass(frozen=True)
class Completion:
    """Sampled tokens of one request."""

    token_ids: list[int]
    """New tokens only, the stop token included."""
    logprobs: list[float]
    """One a token, natural log, float32 values."""
    spans: list[tuple[str, int, int]]
    """(policy version, start, end) within `token_ids`: contiguous, covering all; more than one after a hot reload."""
    finish_reason: FinishReason


class Engine(Protocol):
    """Serves a policy. Safe to call from many tasks of one event loop; canceling a call frees its resources."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Continue `prompt_ids`.

        Raises RequestTooLong when the prompt leaves no room for a token; a context that fills up ends the completion
        with "length".
        """

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Log-probability of each token given those before it; index 0 is 0.0. temperature: above 0."""

    async def load_weights(self, directory: Path, version: str) -> None:
        """Serve the checkpoint in `directory` from now on. Requests in flight continue; later tokens carry
        `version`.
        """

    async def version(self) -> str:
        """Policy version that the next token will carry."""

    async def close(self) -> None:
        """Stop serving; requests in flight end with "abort". Idempotent."""
