"""Dagster resource for the environment plane: one envd server for a run, started on first use, or running ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import dagster as dg
from pydantic import PrivateAttr

from envd.client import SandboxClient
from envd.fleet import open_client
from envd.local import TRUSTED, LocalEnvd
from resources.sandboxes_config import SandboxesConfig


class SandboxesResource(dg.ConfigurableResource[Any]):
    """Provides clients of the sandbox server.

    A server started here runs until the run ends; one that dies is replaced at once, at the same address.
    """

    _servers: dict[str, tuple[LocalEnvd, ExitStack]] = PrivateAttr(default_factory=dict)

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[SandboxesResource]:
        """Provide the resource for one run (one step where steps are processes)."""
        try:
            yield self
        finally:
            self.close()

    def address(self, config: SandboxesConfig) -> str:
        """Address of a server for this configuration, or of several (see `envd.addresses`).

        Starts one unless the configuration or $TRIPLANE_ENVD names one.
        """
        if config.server:
            return config.server
        known = self._servers.get(config.backend)
        if known is not None and known[0].alive:
            return known[0].address
        if known is not None:  # it died too often
            self._servers.pop(config.backend)[1].close()
        with ExitStack() as starting:
            server = starting.enter_context(LocalEnvd(backend=config.backend, rules=TRUSTED, revive=True))
            self._servers[config.backend] = server, starting.pop_all()
        return server.address

    @asynccontextmanager
    async def client(self, config: SandboxesConfig) -> AsyncIterator[SandboxClient]:
        """A connected client, of one server or of a list. Its sandboxes and verdicts run on the configured backend."""
        async with open_client(self.address(config), config.asked_backend) as client:
            yield client

    def close(self) -> None:
        """Stop the servers started here. Idempotent."""
        while self._servers:
            self._servers.popitem()[1][1].close()
