"""Keep one vLLM server for many leases: start it on demand, restart it if it dies, stop it at the end."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import IO

from inference.engines.config import VllmConfig
from inference.engines.http import JsonClient
from inference.engines.vllm_server import Device, VllmServer, devices_owner, find_device, lock_devices
from inference.engines.vllm_update import put_to_sleep
from inference.errors import EngineError

_POLL_S = 0.25
_REPORT_S = 15.0
HEALTH_S = 10.0
"""Health-check timeout, in seconds."""
_log = logging.getLogger(__name__)


class VllmKeeper:
    """Keeper of one configuration's server. Not bound to an event loop; one lease uses it at a time."""

    def __init__(self, config: VllmConfig) -> None:
        self._config = config
        self._server: VllmServer | None = None
        self._device: Device | None = None
        self.note = ""
        """Purpose of the server, shown to processes that wait for its GPUs."""

    @property
    def device(self) -> Device:
        """Device on which vLLM computes."""
        if self._device is None:
            self._device = find_device(self._config)
        return self._device

    @property
    def address(self) -> str | None:
        """Address of a live server, or None."""
        return self._server.address if self._server is not None and self._server.alive else None

    async def start(self, directory: Path) -> str:
        """Start a server with the checkpoint in `directory`, replacing the previous one, and wait until it replies.

        Returns its address.
        """
        await asyncio.to_thread(self.stop)
        locks = await self._devices() if self.device == "gpu" else []
        try:
            self._server = VllmServer(self._config, self.device, directory, locks)
        finally:
            for each in locks:
                each.close()
        _log.info("vLLM is starting on %s for %s", directory, self.note)
        try:
            await self._until_healthy(self._server)
        except BaseException:
            await asyncio.to_thread(self.stop)
            raise
        return self._server.address

    async def answers(self) -> bool:
        """Whether the server is alive and its engine passes the health check."""
        address = self.address
        if address is None:
            return False
        client = JsonClient(address)
        try:
            return await client.is_healthy("/health", HEALTH_S) and self.address is not None
        finally:
            await client.close()

    async def give_back(self) -> None:
        """Free the server's GPUs as `engine.idle` says. The next lease loads its policy from files.

        A server of ours that can't sleep is stopped. Raises EngineError for a server at an address.
        """
        config = self._config
        address = config.base_url or self.address
        if config.idle == "keep" or address is None:
            return
        if config.idle == "stop":
            await asyncio.to_thread(self.stop)
            return
        client = JsonClient(address, timeout_s=config.timeout_s, retries=config.retries)
        try:
            await put_to_sleep(client, config.drain_s)
        except EngineError as error:
            if config.base_url is not None:
                raise
            _log.warning("stopping vLLM, which did not go to sleep: %s", error)
            await asyncio.to_thread(self.stop)
        finally:
            await client.close()

    def stop(self) -> None:
        """Stop the server. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()

    def last_words(self) -> str:
        """End of the server's log."""
        return self._server.last_words() if self._server is not None else "it was stopped"

    async def _devices(self) -> list[IO[str]]:
        deadline = time.monotonic() + self._config.startup_timeout_s
        while True:
            locks = lock_devices(self._config, self.note)
            if locks is not None:
                return locks
            if time.monotonic() > deadline:
                raise EngineError(
                    f"GPUs {list(self._config.devices) or 'of this machine'} are held by {devices_owner(self._config)}:"
                    " wait, or set engine.devices to other GPUs"
                )
            await asyncio.sleep(1.0)

    async def _until_healthy(self, server: VllmServer) -> None:
        began = reported = time.monotonic()
        client = JsonClient(server.address)
        try:
            while not await client.is_healthy("/health", HEALTH_S):
                now = time.monotonic()
                if not server.alive:
                    raise EngineError(f"vLLM ended while it started: {server.last_words()}")
                if now - began > self._config.startup_timeout_s:
                    raise EngineError(
                        f"vLLM did not reply within {self._config.startup_timeout_s:g} s: raise"
                        f" engine.startup_timeout_s; {server.last_words()}"
                    )
                if now - reported > _REPORT_S:
                    reported = now
                    _log.info("vLLM is starting: %.0f s", now - began)
                await asyncio.sleep(_POLL_S)
        finally:
            await client.close()
        _log.info("vLLM is ready after %.0f s", time.monotonic() - began)
