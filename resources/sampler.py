"""Dagster resource for engines that serve a policy.

lease(policy, role) -> the kept engine or vLLM server, hot-reloaded when it serves another policy -> release
give_back -> vLLM sleeps, stops or is scaled to zero while training uses its GPUs
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, Literal

import dagster as dg
from pydantic import PrivateAttr

from contracts.artifacts import Artifact
from inference.engines import Engine, open_engine
from inference.engines.config import OUTSIDE_POLICY, BuiltinConfig, EngineConfig, VllmConfig
from inference.errors import OtherArchitecture

if TYPE_CHECKING:
    from inference.engines.builtin import BuiltinEngine
    from inference.engines.vllm_keeper import VllmKeeper

_log = logging.getLogger(__name__)

Role = Literal["rollouts", "evaluation"]
"""Purpose of a leased engine; shown in the log and in the lock of its GPUs."""


class SamplerResource(dg.ConfigurableResource[Any]):
    """Leases engines to steps.

    The built-in engine and a vLLM server are kept between the leases of a run; each lease opens its own connection to a
    remote engine.
    """

    _kept: dict[str, tuple[BuiltinEngine, str]] = PrivateAttr(default_factory=dict)
    _keepers: dict[str, VllmKeeper] = PrivateAttr(default_factory=dict)

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[SamplerResource]:
        """Provide the resource for one run (one step where steps are processes)."""
        try:
            yield self
        finally:
            self.close()

    @asynccontextmanager
    async def lease(self, policy: Artifact, role: Role, config: EngineConfig) -> AsyncIterator[Engine]:
        """Lease an engine that serves `policy` (a checkpoint, or an `outside_policy`) until the block ends.

        The engine's version is the policy's content digest.
        """
        if policy.ref.kind == OUTSIDE_POLICY:
            from inference.engines.outside import open_outside

            async with open_outside(policy, config) as outside:
                yield outside
            return
        if isinstance(config, BuiltinConfig):
            yield await self._builtin(policy, config)
            return
        engine: Engine
        if isinstance(config, VllmConfig) and config.is_fleet:
            engine = _open_fleet(config, policy)
        else:
            keeper = self._keeper(policy, role, config) if isinstance(config, VllmConfig) else None
            engine = open_engine(config, policy.directory(), policy.ref.digest, keeper)
        try:
            if await engine.version() != policy.ref.digest:
                await engine.load_weights(policy.directory(), policy.ref.digest)
            yield engine
        finally:
            await engine.close()

    def give_back(self, config: EngineConfig) -> None:
        """Free the GPUs of the vLLM servers of `config` until the next lease, if its `idle` asks for it."""
        if not isinstance(config, VllmConfig) or config.idle == "keep":
            return
        if config.is_fleet:
            from inference.engines.fleet import give_back_fleet

            asyncio.run(give_back_fleet(config))
            return
        from inference.engines.vllm_keeper import VllmKeeper

        keeper = self._keepers.get(config.model_dump_json())
        if keeper is None and config.base_url is not None:
            keeper = VllmKeeper(config)
        if keeper is not None:
            asyncio.run(keeper.give_back())

    def _keeper(self, policy: Artifact, role: Role, config: VllmConfig) -> VllmKeeper:
        """Keeper of this configuration's server. Other keepers are stopped, since two servers can't share GPUs."""
        from inference.engines.vllm_keeper import VllmKeeper

        place = config.model_dump_json()
        for other in set(self._keepers) - {place}:
            self._keepers.pop(other).stop()
        keeper = self._keepers.setdefault(place, VllmKeeper(config))
        keeper.note = f"{role} with policy {policy.ref.short}"
        return keeper

    async def _builtin(self, policy: Artifact, config: BuiltinConfig) -> Engine:
        place = config.model_dump_json()
        kept = self._kept.get(place)
        if kept is not None and not await _serves(*kept, policy):
            del self._kept[place]
            await kept[0].close()
            kept = None
        engine = open_engine(config, policy.directory(), policy.ref.digest) if kept is None else kept[0]
        self._kept[place] = (engine, policy.ref.digest)
        return engine

    def close(self) -> None:
        """Stop the engines that are still open. Idempotent."""
        kept, self._kept = self._kept, {}
        for engine, _ in kept.values():
            asyncio.run(engine.close())
        while self._keepers:
            self._keepers.popitem()[1].stop()


def _open_fleet(config: VllmConfig, policy: Artifact) -> Engine:
    """Engine of several servers; of the policy's files only those are fetched that it needs here."""
    from inference.engines.fleet import FleetEngine
    from inference.engines.policies import StoredPolicy

    return FleetEngine(config, StoredPolicy(policy))


async def _serves(engine: BuiltinEngine, served: str, policy: Artifact) -> bool:
    """Make an engine serve `policy`, if it can. served: digest of the policy that it serves now."""
    if engine.stopped:
        _log.warning("the built-in engine had stopped: opening another one for %s", policy.ref.short)
        return False
    try:
        if served != policy.ref.digest:
            await engine.load_weights(policy.directory(), policy.ref.digest)
    except OtherArchitecture:  # e.g. the base policy was made anew with another vocabulary
        return False
    return True
