"""Update the servers of the live policy after every change of the registry.

live? -> load -> a few tokens, stamped and finite? -> live still? -> serving
  ^---------------- no, or a fault ------------------------|
attempts used up -> withdrawn: the server refuses traffic until it is swapped
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from contracts.artifacts import Artifact
from contracts.chat import ChatTokenizer
from contracts.errors import TriplaneError
from contracts.retries import backoff_s
from inference.engines.base import Completion, Engine, SamplingParams
from inference.engines.openai import OpenAIEngine
from inference.errors import EngineError, EngineUnreachable
from resources.errors import ImpossibleCompletion
from resources.experiment import DeploymentConfig

PAUSE_S = 0.5
PROBE = SamplingParams(temperature=1.0, max_tokens=8, seed=0)
WITHDRAW_TIMEOUT_S = 10.0
_log = logging.getLogger(__name__)

Live = Callable[[], Artifact]
"""The checkpoint that is live now."""


@dataclass(frozen=True)
class ServerState:
    """Result of updating one server after a change of the live policy."""

    url: str
    policy: str | None
    """Digest of the live policy that it serves, or None."""
    fault: str | None
    """Why the server does not serve that policy, and whether it was withdrawn; None if it serves it."""
    error: TriplaneError | None = None
    """Error of the last attempt; None if there was none, or the live policy changed meanwhile."""

    def row(self) -> dict[str, str | None]:
        """What users see, for JSON."""
        return {"url": self.url, "policy": self.policy, "fault": self.fault}


async def swap_servers(config: DeploymentConfig, live: Live) -> list[ServerState]:
    """Update all servers to the live policy concurrently. Requests in flight continue."""
    return list(await asyncio.gather(*(_swap(url, config, live) for url in config.servers)))


@asynccontextmanager
async def open_canary(config: DeploymentConfig, policy: Artifact) -> AsyncIterator[Engine]:
    """Canary that serves `policy`. Raises EngineError."""
    assert config.canary is not None, "the caller checks that a canary is configured"
    engine = _connect(config.canary, config, policy)
    try:
        await engine.load_weights(policy.directory(), policy.ref.digest)
        yield engine
    finally:
        await engine.close()


def fault_of(completion: Completion, version: str) -> str | None:
    """Defect of a completion that a healthy engine of `version` can't produce, or None."""
    tokens, logprobs, end = len(completion.token_ids), completion.logprobs, 0
    if completion.finish_reason == "abort":
        return "the engine aborted the request"
    if not tokens:
        return "no token came back"
    if len(logprobs) != tokens:
        return f"{tokens} tokens came back with {len(logprobs)} logprobs"
    for place, value in enumerate(logprobs):
        if not math.isfinite(value) or value > 1e-6:
            return f"the logprob of token {place} is {value}"
    for stamped, start, stop in completion.spans:
        if stamped != version:
            return f"tokens were sampled with policy {stamped[:12]} instead of {version[:12]}"
        if start != end or stop <= start:
            return "the policy spans leave gaps"
        end = stop
    return None if end == tokens else "some tokens are stamped with no policy"


async def _swap(url: str, config: DeploymentConfig, live: Live) -> ServerState:
    fault, last = "", None
    for attempt in range(config.attempts):
        policy = await asyncio.to_thread(live)
        try:
            await _serve(url, config, policy, reload=attempt > 0)
        except TriplaneError as error:
            fault, last = str(error), error
        else:
            if (await asyncio.to_thread(live)).ref == policy.ref:
                return ServerState(url, policy.ref.digest, None)
            fault, last = f"the live policy changed during each of {config.attempts} attempts", None
            continue
        if attempt + 1 < config.attempts:
            await asyncio.sleep(backoff_s(attempt + 1, PAUSE_S))
    said = await _withdraw(url, f"it could not be swapped to policy {policy.ref.short}")
    _log.warning("%s does not serve the live policy %s: %s; %s", url, policy.ref.short, fault, said)
    return ServerState(url, None, f"{fault}; {said}", last)


async def _serve(url: str, config: DeploymentConfig, policy: Artifact, *, reload: bool) -> None:
    """Make a server serve `policy` and test it. Raises EngineError."""
    engine = _connect(url, config, policy)
    try:
        loaded = reload or await engine.version() != policy.ref.digest
        if loaded:
            await engine.load_weights(policy.directory(), policy.ref.digest)
        prompt = ChatTokenizer.from_directory(policy.directory()).prompt([("user", "ready?")])
        try:
            completion = await engine.generate(prompt, PROBE)
        except EngineUnreachable:
            raise
        except EngineError:
            if loaded:
                raise
            # a withdrawn server still has its policy, and serves again once it is given one
            await engine.load_weights(policy.directory(), policy.ref.digest)
            completion = await engine.generate(prompt, PROBE)
    finally:
        await engine.close()
    fault = fault_of(completion, policy.ref.digest)
    if fault is not None:
        foreign = any(version != policy.ref.digest for version, _, _ in completion.spans)
        kind = EngineError if foreign or completion.finish_reason == "abort" else ImpossibleCompletion
        raise kind(f"{url} failed its test after the swap: {fault}")


def _connect(url: str, config: DeploymentConfig, policy: Artifact) -> OpenAIEngine:
    return OpenAIEngine(
        url, "policy", version=policy.ref.digest, directory=policy.directory(), timeout_s=config.timeout_s, retries=1
    )


async def _withdraw(url: str, reason: str) -> str:
    """Take a server out of service. Returns the result as text."""
    try:
        async with httpx.AsyncClient(timeout=WITHDRAW_TIMEOUT_S) as http:
            async with http.stream("POST", f"{url}/withdraw", json={"reason": reason}) as reply:
                reply.raise_for_status()
    except httpx.HTTPError as error:
        return f"withdrawing it failed, too ({type(error).__name__}): remove it from traffic by hand"
    return "it was withdrawn"
