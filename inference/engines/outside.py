"""A policy that this store does not hold, at a server of the OpenAI completions API.

It goes by the digest of an `outside_policy`: an artifact with the policy's tokenizer and `policy.json`, which says
under which model name, and as which version, the server served it. Addresses are no part of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from contracts.artifacts import Artifact
from inference.engines.base import Completion, Engine, SamplingParams, StreamsWhole
from inference.engines.config import EngineConfig, OpenAIConfig
from inference.engines.delegating import DelegatingEngine
from inference.engines.openai import OpenAIEngine
from inference.errors import EngineError, StaleVersion


class OutsideEngine(StreamsWhole, DelegatingEngine):
    """Engine whose tokens have the digest of an `outside_policy`, and never come from another version."""

    def __init__(self, inner: Engine, served: str, digest: str) -> None:
        """served: version that the server must name; digest: of the artifact."""
        super().__init__(inner)
        self._served, self._digest = served, digest

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See Engine.generate. Raises StaleVersion for tokens of another version."""
        made = await self.inner.generate(prompt_ids, params)
        other = next((version for version, _, _ in made.spans if version != self._served), None)
        if other is not None:
            raise StaleVersion(f"the server samples with {other[:24]!r} now, the policy is {self._served[:24]!r}")
        return replace(made, spans=[(self._digest, start, end) for _, start, end in made.spans])

    async def version(self) -> str:
        """See Engine.version."""
        return self._digest


@asynccontextmanager
async def open_outside(policy: Artifact, config: EngineConfig) -> AsyncIterator[OutsideEngine]:
    """Engine of an `outside_policy` at the server of `config`. Raises StaleVersion if that serves another version."""
    if not isinstance(config, OpenAIConfig):
        raise EngineError(f"policy {policy.ref.short} is at a server, not in the store: name it by the server's URL")
    served = policy.json("policy.json")
    async with connected(config, served["model"], served["version"] if served["pinned"] else None) as engine:
        if await engine.version() != served["version"]:
            raise StaleVersion(
                f"{config.base_url} does not serve {served['version'][:24]!r} any more: evaluate it anew"
            )
        yield OutsideEngine(engine, served["version"], policy.ref.digest)


@asynccontextmanager
async def connected(config: OpenAIConfig, model: str, version: str | None = None) -> AsyncIterator[OpenAIEngine]:
    """Client of the server of `config`, closed at the end. version: that Triplane's server must serve; None: any."""
    engine = OpenAIEngine(
        config.base_url,
        model,
        version=version,
        connections=config.connections,
        timeout_s=config.timeout_s,
        retries=config.retries,
    )
    try:
        yield engine
    finally:
        await engine.close()
