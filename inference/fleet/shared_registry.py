"""Registry in a Redis server, for several routers in front of one fleet.

Each entry is a key that expires with its lease, named in a set of its kind:

    triplane:fleet:NAME:{joined,drains,views}            set of URLs, or of routers
    triplane:fleet:NAME:{joined,drains,views}:URL        JSON

Every client that can write to the Redis server is trusted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ValidationError

from contracts.errors import ConfigError
from inference.errors import FleetError
from inference.fleet.registry import Drain, Joined, Snapshot, View, superseded
from inference.router.wire import require

VIEW_S = 30.0
"""Seconds after which the view of a router that says nothing is forgotten; more than two probes take, between which it
looks at the registry.
"""
_FOREVER_S = 30 * 86400.0
_TIMEOUT_S = 2.0
_PUT = """
local index = KEYS[1] .. ':' .. ARGV[1]
local key = index .. ':' .. ARGV[2]
local before = ARGV[5] ~= '' and redis.call('GET', key)
if before and cjson.decode(before).started > tonumber(ARGV[5]) then return 0 end
redis.call('SET', key, ARGV[3], 'PX', ARGV[4])
redis.call('SADD', index, ARGV[2])
return 1
"""
_DROP = """
local index = KEYS[1] .. ':' .. ARGV[1]
local key = index .. ':' .. ARGV[2]
local before = redis.call('GET', key)
if before and cjson.decode(before).started ~= tonumber(ARGV[3]) then return 0 end
redis.call('DEL', key)
redis.call('SREM', index, ARGV[2])
return 1
"""
_DRAIN = """
local index = KEYS[1] .. ':drains'
local key = index .. ':' .. ARGV[1]
local before = ARGV[4] ~= '*' and redis.call('GET', key)
if before and cjson.decode(before).token ~= ARGV[4] then return 0 end
if ARGV[2] == '' then
  redis.call('DEL', key)
  redis.call('SREM', index, ARGV[1])
else
  redis.call('SET', key, ARGV[2], 'PX', ARGV[3])
  redis.call('SADD', index, ARGV[1])
end
return 1
"""
_READ = """
local found = {}
for _, kind in ipairs({'joined', 'drains', 'views'}) do
  local index = KEYS[1] .. ':' .. kind
  for _, id in ipairs(redis.call('SMEMBERS', index)) do
    local value = redis.call('GET', index .. ':' .. id)
    if value then found[#found + 1] = {kind, id, value} else redis.call('SREM', index, id) end
  end
end
return {redis.call('TIME'), found}
"""


class SharedRegistry:
    """See registry.Registry. Belongs to one event loop."""

    def __init__(self, url: str, fleet: str = "default") -> None:
        """url: as of router.shared.SharedRouter. Raises ConfigError for an unusable one, and without the package."""
        redis = require("redis.asyncio", extra="redis")
        self._errors: tuple[type[Exception], ...] = (require("redis", extra="redis").RedisError, OSError)
        self._refused = require("redis.exceptions", extra="redis").AuthenticationError
        try:
            self._redis = redis.from_url(url, protocol=2, socket_connect_timeout=_TIMEOUT_S, socket_timeout=_TIMEOUT_S)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"no address of a Redis server: {error}; write redis://HOST:PORT/0") from None
        self._root = f"triplane:fleet:{fleet}"

    async def start(self) -> None:
        """See Registry.start. An unreachable server is not an error yet."""
        try:
            await self._redis.ping()
        except self._errors as error:
            # redis-py wraps an AuthenticationError during connection setup in a ConnectionError
            if isinstance(error, self._refused) or isinstance(error.__cause__, self._refused):
                await self.close()
                raise ConfigError(f"Redis refuses the user or the password of its URL: {error}") from None

    async def join(self, replica: Joined) -> None:
        """See Registry.join."""
        if not await self._put("joined", replica.url, replica.model_dump(), replica.lease_s, replica.started):
            raise superseded(replica.url)

    async def leave(self, url: str, started: float) -> None:
        """See Registry.leave."""
        await self._run(_DROP, "joined", url, repr(started))

    async def drain(self, url: str, drain: Drain | None, replaces: str | None = None) -> None:
        """See Registry.drain."""
        content, seconds = "", 0.0
        if drain is not None:
            (now, micros), _ = await self._run(_READ)
            content = json.dumps({**drain.model_dump(), "began": int(now) + int(micros) / 1e6})
            seconds = drain.hold_s or _FOREVER_S
        await self._run(_DRAIN, url, content, _milliseconds(seconds), "*" if replaces is None else replaces)

    async def sync(self, router: str, view: View) -> Snapshot:
        """See Registry.sync."""
        await self._put("views", router, view.model_dump(), VIEW_S)
        (seconds, micros), entries = await self._run(_READ)
        now = int(seconds) + int(micros) / 1e6
        found: dict[str, dict[str, Any]] = {"joined": {}, "drains": {}, "views": {}}
        read: dict[str, Callable[[Any], BaseModel]] = {
            "joined": Joined.model_validate,
            "drains": lambda content: _left(content, now),
            "views": View.model_validate,
        }
        for kind, name, value in entries:
            try:
                found[kind.decode()][name.decode()] = read[kind.decode()](json.loads(value))
            except (ValueError, ValidationError, TypeError, KeyError):
                continue  # not written by a router of this version
        found["views"].pop(router, None)
        return Snapshot(found["joined"], found["drains"], found["views"])

    async def close(self) -> None:
        """See Registry.close."""
        await self._redis.aclose()

    async def _put(
        self, kind: str, name: str, content: dict[str, Any], seconds: float, started: float | None = None
    ) -> bool:
        first = "" if started is None else repr(started)
        return bool(await self._run(_PUT, kind, name, json.dumps(content), _milliseconds(seconds), first))

    async def _run(self, script: str, *arguments: str) -> Any:
        try:
            return await self._redis.eval(script, 1, self._root, *arguments)
        except self._errors as error:
            raise FleetError(f"the registry in Redis can't be reached ({error}): retry when it is back") from error


def _milliseconds(seconds: float) -> str:
    return str(max(1, int(seconds * 1000)))


def _left(content: dict[str, Any], now: float) -> Drain:
    """A drain with the seconds that are left."""
    left = max(0.0, content["sessions_s"] - now + content["began"])
    return Drain(token=content["token"], sessions_s=left, hold_s=content["hold_s"])
