"""Client of the weights service beside a vLLM server (`python -m inference weights`)."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import httpx

from contracts.rpc.connecting import read_named_key
from inference.engines.http import JsonClient
from inference.engines.policies import PolicyFiles
from inference.errors import EngineError, EngineUnreachable

KEY_VARIABLE = "TRIPLANE_WEIGHTS_KEY_FILE"
"""Environment variable with the file whose first line is the key of the weights services."""
_WAIT_S = 20.0
_CALL_S = 60.0
_log = logging.getLogger(__name__)


class Sidecar:
    """Weights service at `address`, e.g. http://host:7500. Belongs to one event loop."""

    def __init__(self, address: str, *, timeout_s: float) -> None:
        """timeout_s: of a pull without progress. Raises ConfigError for a key file that can't be used."""
        key = read_named_key(KEY_VARIABLE)
        headers = {"authorization": f"Bearer {key}"} if key else None
        self._client = JsonClient(address, timeout_s=_CALL_S, retries=2, headers=headers)
        self._timeout_s = timeout_s

    async def pull(self, files: PolicyFiles, plain: bool) -> Path:
        """Have the policy pulled, and return its folder on the server's machine. plain: as float32 weights.

        Raises EngineError for a policy that is in no store, and with the service's words.
        """
        ref = files.ref
        if ref is None:
            raise EngineError(
                f"policy {files.version[:12]} in {files.name} is no artifact of a store: unset engine.weights_port"
            )
        body = {"digest": ref.digest, "key": ref.key, "kind": ref.kind, "plain": plain, "wait_s": _WAIT_S}
        done, since = -1, time.monotonic()
        while True:
            directory, now, total = await self._client.read("POST", "/pull", _pulled, body)
            if directory is not None:
                return directory
            if now != done:
                done, since = now, time.monotonic()
                _log.info("%s pulls %s: %d of %d bytes", self._client.base, ref.short, done, total)
            if time.monotonic() - since > self._timeout_s:
                raise EngineUnreachable(
                    f"{self._client.base} made no progress with policy {ref.short} for {self._timeout_s:g} s: check its"
                    " store, or raise engine.startup_timeout_s"
                )

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


def _pulled(reply: dict[str, Any]) -> tuple[Path | None, int, int]:
    """Folder of the policy once it is there, else None; bytes that have arrived, and all of them."""
    if "directory" in reply:
        return Path(reply["directory"]), 0, 0
    return None, int(reply["done"]), int(reply["total"])


def sidecar_address(server: str, port: int) -> str:
    """Address of the weights service at the host of a server."""
    host = httpx.URL(server).host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
