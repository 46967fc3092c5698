"""Base class of engines that wrap another one to observe some of its calls."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from inference.engines.base import Completion, Engine, Piece, SamplingParams


class DelegatingEngine:
    """`Engine` that forwards every call to `inner`. Override the calls to observe."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See Engine.generate."""
        return await self.inner.generate(prompt_ids, params)

    def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
        """See Engine.stream."""
        return self.inner.stream(prompt_ids, params)

    def streams(self, params: SamplingParams) -> bool:
        """See Engine.streams."""
        return self.inner.streams(params)

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """See Engine.score."""
        return await self.inner.score(token_ids, temperature)

    async def load_weights(self, directory: Path, version: str) -> None:
        """See Engine.load_weights."""
        await self.inner.load_weights(directory, version)

    async def version(self) -> str:
        """See Engine.version."""
        return await self.inner.version()

    async def close(self) -> None:
        """See Engine.close."""
        await self.inner.close()
