"""Intervals of work by kind, recorded around calls to engines and sandboxes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from pydantic import PrivateAttr

from contracts.artifacts import Artifact
from envd.client import Sandbox, SandboxClient
from envd.types import Handle, ToolCall, ToolResult, VerifyResult
from inference.engines import EngineConfig
from inference.engines.base import Completion, Engine, SamplingParams
from inference.engines.delegating import DelegatingEngine
from resources.sampler import Role, SamplerResource
from resources.sandboxes import SandboxesResource
from resources.sandboxes_config import SandboxesConfig

Interval = tuple[float, float]


class Spans:
    """Intervals by kind: sampling, tools, grading."""

    def __init__(self) -> None:
        self.intervals: dict[str, list[Interval]] = {"sampling": [], "tools": [], "grading": []}

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """Record the duration of the block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.intervals[kind].append((begin, time.perf_counter()))

    def busy(self, *kinds: str) -> float:
        """Seconds in which at least one interval of these kinds was open."""
        return union_seconds(interval for kind in kinds for interval in self.intervals[kind])


def union_seconds(intervals: Iterable[Interval]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


class MeasuredEngine(DelegatingEngine):
    """An engine whose calls are recorded."""

    def __init__(self, engine: Engine, spans: Spans) -> None:
        super().__init__(engine)
        self._spans = spans

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See Engine.generate."""
        with self._spans.of("sampling"):
            return await super().generate(prompt_ids, params)

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """See Engine.score."""
        with self._spans.of("sampling"):
            return await super().score(token_ids, temperature)


class MeasuredSandbox(Sandbox):
    """A sandbox whose calls are recorded."""

    def __init__(self, client: SandboxClient, handle: Handle, spans: Spans) -> None:
        super().__init__(client, handle)
        self._spans = spans

    async def batch(self, calls: Sequence[ToolCall], **options: Any) -> list[ToolResult]:
        """See Sandbox.batch."""
        with self._spans.of("tools"):
            return await super().batch(calls, **options)

    async def finish(self, **options: Any) -> bytes:
        """See Sandbox.finish."""
        with self._spans.of("tools"):
            return await super().finish(**options)


class MeasuredClient(SandboxClient):
    """A client whose sandboxes and verifications are recorded."""

    def __init__(self, address: str, backend: str, spans: Spans) -> None:
        super().__init__(address, backend=backend)
        self._spans = spans

    async def create(self, template: str, **options: Any) -> Sandbox:
        """See SandboxClient.create."""
        with self._spans.of("tools"):
            made = await super().create(template, **options)
        return MeasuredSandbox(self, made.handle, self._spans)

    async def verify(
        self,
        template: str,
        diff: bytes,
        hidden_files: Mapping[str, bytes],
        tests: Sequence[str],
        **options: Any,
    ) -> VerifyResult:
        """See SandboxClient.verify."""
        with self._spans.of("grading"):
            return await super().verify(template, diff, hidden_files, tests, **options)


class MeasuredSandboxes(SandboxesResource):
    """Provides measured clients."""

    _spans: Spans = PrivateAttr(default_factory=Spans)

    @asynccontextmanager
    async def client(self, config: SandboxesConfig) -> AsyncIterator[SandboxClient]:
        """See SandboxesResource.client."""
        async with MeasuredClient(self.address(config), config.asked_backend, self._spans) as client:
            yield client

    def record_in(self, spans: Spans) -> None:
        """Set the spans in which later clients record."""
        self._spans = spans


class MeasuredSampler(SamplerResource):
    """Leases measured engines."""

    _spans: Spans = PrivateAttr(default_factory=Spans)

    @asynccontextmanager
    async def lease(self, policy: Artifact, role: Role, config: EngineConfig) -> AsyncIterator[Engine]:
        """See SamplerResource.lease."""
        async with super().lease(policy, role, config) as engine:
            yield MeasuredEngine(engine, self._spans)

    def record_in(self, spans: Spans) -> None:
        """Set the spans in which later engines record."""
        self._spans = spans
