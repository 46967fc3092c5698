"""Roll a policy out over a fleet, at most N replicas at a time, so that no pinned session meets another version.

replica: drain, seen by all routers --> no request in flight --> load --> a probe finds the version --> drain ends
the last ones of a version: drained too, but asked by that version's open sessions until these end, or `sessions_s`

If this process ends in between, the drain lapses, and the replica is asked again for the version that it then serves.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from contracts.errors import ConfigError, TriplaneError
from inference.engines.config import VllmConfig
from inference.engines.http import JsonClient
from inference.engines.policies import PolicyFiles, Preparer
from inference.engines.replica import Replica
from inference.errors import FleetError
from inference.fleet.client import FleetClient, row_of

HOLD_S = 30.0
"""Seconds after which a replica is asked again if the updating process is gone."""
POLL_S = 0.2
Row = dict[str, Any]
"""A replica in `Fleet.state`."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rollout:
    """How a policy is rolled out."""

    at_once: int = 1
    """Replicas that are updated at the same time, at most; fewer than serve, unless there is only one."""
    sessions_s: float = 600.0
    """Seconds for which the last replicas of a version wait for its open sessions."""
    requests_s: float = 120.0
    """Seconds for which a replica waits for its requests in flight; then they are answered 409, or aborted."""
    proof_s: float = 120.0
    """Seconds until a probe must have found the new version."""


Load = Callable[[str], Awaitable[None]]
"""Loads the policy into the replica at a URL. Raises TriplaneError."""


async def roll(client: FleetClient, version: str, load: Load, rollout: Rollout, say: Callable[[str], None]) -> None:
    """Update every replica that serves another version, or none because an earlier update did not end; those that drain
    when it is their turn, or are away, stay as they are.

    say: told of each step. Raises FleetError after the first replica that can't be updated; the others keep their
    version, and those being updated are finished before.
    """
    rows = (await client.state())["replicas"]
    left = [row for row in rows if row["version"] != version and row["drain"] is None and row["state"] != "away"]
    asked = [row for row in rows if row["state"] == "serving"]
    for row in rows:
        if row not in left and row["version"] != version:
            say(f"{row['url']} is {'away' if row['state'] == 'away' else 'draining'}: left as it is")
    if rollout.at_once >= len(asked) > 1:
        raise ConfigError(
            f"--at-once={rollout.at_once}: must be less than the {len(asked)} replicas that serve, so that one does"
        )
    left.sort(key=lambda row: (row["sessions"], row["url"]))
    roll = _Roll(client, version, load, rollout, say)
    await asyncio.gather(*(roll.work(left) for _ in range(rollout.at_once)))
    if roll.faults:
        raise FleetError(
            f"{'; '.join(roll.faults)}. The rollout of {version[:12]} stopped there: correct the fault and run it again"
        )


class _Hold:
    """A drain that lapses unless it is renewed."""

    def __init__(self, client: FleetClient, url: str) -> None:
        self._client, self._url = client, url
        self._until = 0.0
        self._token = ""

    def left(self) -> float:
        """Seconds for which sessions may still stay."""
        return max(0.0, self._until - time.monotonic())

    async def begin(self, sessions_s: float) -> None:
        """Begin a drain, or replace this one by a new one, which routers report apart. Raises _DrainedByOthers."""
        self._until, token = time.monotonic() + sessions_s, uuid.uuid4().hex
        state = await self._client.drain(self._url, sessions_s, hold_s=HOLD_S, token=token, replaces=self._token)
        self._token = token
        self.check(row_of(state, self._url))

    def check(self, row: Row) -> None:
        """Raise _DrainedByOthers if the replica of this row has another drain than this one."""
        if row["drain"] not in (self._token, None):
            raise _DrainedByOthers

    async def end(self) -> None:
        """End the drain. One of somebody else stays."""
        await self._client.undrain(self._url, replaces=self._token)

    async def renewed(self) -> None:
        """Renew until cancelled."""
        while True:
            await asyncio.sleep(HOLD_S / 3)
            try:
                await self._client.drain(self._url, self.left(), hold_s=HOLD_S, token=self._token, replaces=self._token)
            except FleetError as error:
                _log.warning("%s; trying again before the drain lapses", error)


class _DrainedByOthers(Exception):
    """Somebody else drains a replica: it is left as it is."""


class _Roll:
    def __init__(
        self, client: FleetClient, version: str, load: Load, rollout: Rollout, say: Callable[[str], None]
    ) -> None:
        self._client, self._version, self._load, self._rollout, self._say = client, version, load, rollout, say
        self._turn = asyncio.Lock()
        self.faults: list[str] = []

    async def work(self, left: list[Row]) -> None:
        """Update replicas until none is left, or one can't be updated."""
        while left and not self.faults:
            url = left.pop(0)["url"]
            try:
                async with self._drained(url):
                    self._say(f"{url}: loading {self._version[:12]}")
                    await self._load(url)
                    await self._until(url, lambda row: row["version"] == self._version and row["fault"] is None)
                self._say(f"{url} serves {self._version[:12]}")
            except _DrainedByOthers:
                self._say(f"{url} is draining: left as it is")
            except TriplaneError as error:
                self.faults.append(f"{url} can't be updated: {error}")

    @asynccontextmanager
    async def _drained(self, url: str) -> AsyncIterator[None]:
        """Keep a replica without requests. Raises _DrainedByOthers."""
        async with self._turn:  # so that two don't both leave the last replica of a version to the other
            state = await self._client.state()
            row = row_of(state, url)
            others = [each for each in state["replicas"] if each["version"] == row["version"] and each["url"] != url]
            is_version = bool(row["version"]) and row["state"] != "updating"
            last = is_version and not any(each["state"] == "serving" for each in others)
            hold = _Hold(self._client, url)
            await hold.begin(self._rollout.sessions_s if last else 0.0)
        holding = asyncio.create_task(hold.renewed())
        try:
            self._say(f"{url} drains" + (f": the last one of {row['version'][:12]}" if last else ""))
            if last:
                await self._unpinned(row["version"], hold)
                await hold.begin(0.0)
            await self._idle(url, hold)
            yield
        finally:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            await hold.end()

    async def _unpinned(self, version: str, hold: _Hold) -> None:
        """Wait until no open session is pinned to a version, or the sessions' time is over."""
        while hold.left() and (await self._client.state())["pinned"].get(version):
            await asyncio.sleep(POLL_S)

    async def _idle(self, url: str, hold: _Hold) -> None:
        """Wait until all routers know of the drain and no request is in flight. Raises _DrainedByOthers."""
        until = time.monotonic() + self._rollout.requests_s
        while True:
            row = row_of(await self._client.state(), url)
            hold.check(row)
            if row["drain_seen"] and not row["requests"]:
                return
            if time.monotonic() > until:
                self._say(f"{url}: {row['requests']} requests are still in flight, and may be refused or aborted")
                return
            await asyncio.sleep(POLL_S)

    async def _until(self, url: str, reached: Callable[[Row], bool]) -> None:
        until = time.monotonic() + self._rollout.proof_s
        while not reached(row := row_of(await self._client.state(), url)):
            if time.monotonic() > until:
                raise FleetError(f"it serves {row['version']} {self._rollout.proof_s:g} s later ({row['fault']})")
            await asyncio.sleep(POLL_S)


class Loader:
    """Loads a policy into servers of ours, and into vLLM, where it is proven to be served. Belongs to one loop."""

    def __init__(self, files: PolicyFiles, weights_port: int | None = None) -> None:
        """weights_port: of `python -m inference weights` at the host of each vLLM server; None: servers read the files
        of this machine.
        """
        self._files, self._weights_port = files, weights_port
        self._preparer: Preparer | None = None

    async def load(self, url: str) -> None:
        """See Load. Raises EngineError."""
        async with httpx.AsyncClient(trust_env=False, timeout=30.0) as http:
            try:
                async with http.stream("GET", f"{url}/weight_info") as reply:
                    is_vllm = reply.is_success
            except httpx.HTTPError as error:
                raise FleetError(f"it does not reply ({type(error).__name__})") from None
        await (self._load_vllm(url) if is_vllm else self._load_ours(url))

    async def _load_ours(self, url: str) -> None:
        client = JsonClient(url, timeout_s=900.0, retries=0)
        body = {"directory": str(self._files.directory().absolute()), "version": self._files.version}
        try:
            await client.call("POST", "/v1/load_weights", body)
        finally:
            await client.close()

    async def _load_vllm(self, url: str) -> None:
        config = VllmConfig(base_url=url, weights_port=self._weights_port)
        self._preparer = self._preparer or Preparer(config)
        replica = Replica(config, url, self._files, self._preparer)
        try:
            await replica.update(self._files)
            if replica.fault is not None:
                raise replica.fault
        finally:
            await replica.close()
