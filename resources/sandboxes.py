"""The environment plane as a Dagster resource: one envd server for a run, started on first use, or one that already runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import dagster as dg
from pydantic import PrivateAttr

from envd.client import SandboxClient
from envd.local import LocalEnvd
from resources.experiment import SandboxesConfig


class SandboxesResource(dg.ConfigurableResource[Any]):
    """Hands out clients. A server that it starts lives until the run ends."""

    _servers: ExitStack = PrivateAttr(default_factory=ExitStack)
    _addresses: dict[str, str] = PrivateAttr(default_factory=dict)

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[SandboxesResource]:
        """Live for one run (one step where steps are processes)."""
        try:
            yield self
        finally:
            self.close()

    def address(self, config: SandboxesConfig) -> str:
        """Where a server for this configuration answers; starts one unless the configuration names one."""
        if config.address is not None:
            return config.address
        if config.backend not in self._addresses:
            server = self._servers.enter_context(LocalEnvd(backend=config.backend))
            self._addresses[config.backend] = server.address
        return self._addresses[config.backend]

    @asynccontextmanager
    async def client(self, config: SandboxesConfig) -> AsyncIterator[SandboxClient]:
        """A connected client."""
        async with SandboxClient(self.address(config)) as client:
            yield client

    def close(self) -> None:
        """Stop the servers started here. Idempotent."""
        self._addresses.clear()
        self._servers.close()
