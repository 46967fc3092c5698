"""Engine for several vLLM servers of one policy.

lease --> scale up (idle: scale) --> resolve addresses --> update every server, verify it --> spread calls over those
                                                              that serve, by what they have cached (inference.router)
a call fails, or the watch finds a server dead, restarted or with another policy
  --> left out: never asked; its calls are repeated elsewhere --> updated and verified again in the background

Tokens are returned when all are there, so a call can be repeated: its caller has seen no token of the lost one. The
fleet serves while at least one server does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from contracts.addresses import resolve
from contracts.errors import InfraFault, TriplaneError
from inference.engines.base import Completion, Piece, SamplingParams, collect
from inference.engines.config import VllmConfig
from inference.engines.hedging import Hedging, Streams
from inference.engines.http import JsonClient
from inference.engines.policies import PolicyDirectory, PolicyFiles, Preparer
from inference.engines.replica import Replica
from inference.engines.scaling import Scale
from inference.engines.tries import common_error, router_arguments, send_call
from inference.engines.vllm import VllmEngine
from inference.engines.vllm_update import put_to_sleep
from inference.errors import EngineError, EngineStopped, EngineUnreachable
from inference.router import Decision, Namespace, Router, RouterConfig
from inference.router.shared import shared_by
from inference.router.subscriber import Subscriptions

T = TypeVar("T")
WATCH_S = 5.0
"""Seconds between two checks of the servers, and of the addresses of names while a server is missing."""
CHECK_S, MISSES = 10.0, 3
"""Timeout of a check in seconds, and checks without reply after which a server counts as dead."""
REPORT_S = 15.0
_log = logging.getLogger(__name__)


class FleetEngine:
    """See inference.engines.base.Engine. Belongs to one event loop."""

    def __init__(self, config: VllmConfig, files: PolicyFiles) -> None:
        self._config, self._files = config, files
        self._preparer = Preparer(config)
        self._router = Router(Namespace(files.version), RouterConfig(block_tokens=config.block_tokens))
        self._events = Subscriptions(self._router, config.events_port)
        self._shared = shared_by(config.redis_env, [config.base_url], self._router, self._events)
        self._replicas: dict[str, Replica] = {}
        self.hedging = None if config.hedging_delay_s is None else Hedging(config.hedging_delay_s)
        """None: nothing is hedged."""
        ours = self._router, self._replicas, self._chosen
        self._streams = Streams(*ours, Replica.stream, self._lost, self.hedging)
        self._misses: dict[str, int] = {}
        self._scale = Scale(config.statefulset) if config.statefulset is not None else None
        self._lock = asyncio.Lock()
        self._started = False
        self._changed = asyncio.Event()
        """Set when a server starts to serve or is left out."""
        self._watching: asyncio.Task[None] | None = None
        self._closed = False

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See Engine.generate. Turns of an episode, which have the same seed, are a session of the router."""
        if self.hedging is not None and self.streams(params):
            return await collect(self.stream(prompt_ids, params))
        return await self._call(lambda engine: engine.generate(prompt_ids, params), prompt_ids, params)

    def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
        """See Engine.stream. As VllmEngine.stream; after a fault another server samples all."""
        return self._streams.of(prompt_ids, params, hedged=self.streams(params))

    def streams(self, params: SamplingParams) -> bool:
        """See Engine.streams."""
        return params.routing_from is None

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """See Engine.score. As VllmEngine.score."""
        return await self._call(lambda engine: engine.score(token_ids, temperature), token_ids)

    async def load_weights(self, directory: Path, version: str) -> None:
        """See Engine.load_weights. Servers that can't are left out; raises EngineError if none can."""
        async with self._lock:
            former, self._files = self._files, PolicyDirectory(directory, version)
            try:
                await (self._update() if self._started else self._start())
            except BaseException:
                self._files = former
                self._doubt()
                raise

    async def version(self) -> str:
        """See Engine.version. Updates the servers first; at least one serves the version that is returned."""
        await self._serving()
        return self._files.version

    async def close(self) -> None:
        """See Engine.close. The servers keep running."""
        if self.hedging is not None and not self._closed:
            self.hedging.report()
        self._closed = True
        self._changed.set()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        await self._events.close()
        if self._shared is not None:
            await self._shared.close()
        await asyncio.gather(*(each.close() for each in self._replicas.values()))

    def serving(self) -> list[str]:
        """Addresses of the servers that serve the policy."""
        return [each.url for each in self._replicas.values() if each.serves]

    async def _call(
        self,
        call: Callable[[VllmEngine], Coroutine[Any, Any, T]],
        prompt: Sequence[int],
        params: SamplingParams | None = None,
    ) -> T:
        """params: of a turn; None: nothing is sampled."""

        async def choose() -> tuple[Replica, Decision]:
            return await self._chosen(prompt, params)

        return await send_call(self._router, choose, lambda replica: replica.ask(call(replica.engine)), self._lost)

    async def _chosen(self, prompt: Sequence[int], params: SamplingParams | None) -> tuple[Replica, Decision]:
        """A server for a request, which has begun there."""
        serving = await self._serving()
        decision = self._router.route(prompt, [*serving], **router_arguments(params))
        return serving[decision.replica], decision

    def _lost(self, replica: Replica, error: TriplaneError) -> None:
        """A call failed at a server. Raises EngineStopped if this engine is closed."""
        if self._closed:
            raise EngineStopped("the engine is closed: open another one") from error
        self._leave_out(replica, error)

    async def _serving(self) -> dict[str, Replica]:
        """The servers that serve, by address, as soon as there is one. Raises EngineError if none does in time."""
        await self._ready()
        deadline = time.monotonic() + self._config.startup_timeout_s
        while True:
            if self._closed:
                raise EngineStopped("the engine is closed: open another one")
            serving = {url: each for url, each in self._replicas.items() if each.serves}
            if serving:
                return serving
            left = deadline - time.monotonic()
            if left <= 0 or all(each.is_given_up for each in self._replicas.values()):
                raise self._nobody()
            self._changed.clear()
            try:
                async with asyncio.timeout(min(left, WATCH_S)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _ready(self) -> None:
        """Start, once."""
        if self._closed:
            raise EngineStopped("the engine is closed: open another one")
        if self._started:  # without the lock: the watch may hold it
            return
        async with self._lock:
            if not self._started:
                await self._start()

    async def _start(self) -> None:
        """Find the servers and make them serve the policy."""
        if self._scale is not None:
            await asyncio.to_thread(self._scale.set, self._config.replicas)
        await self._found()
        await self._update()
        if self._shared is not None:
            await self._shared.start()
        self._started = True
        self._watching = asyncio.create_task(self._watch())

    async def _update(self) -> None:
        """Make every server serve the policy. Raises EngineError with each server's fault if none does."""
        files, replicas = self._files, list(self._replicas.values())
        self._router.serve(Namespace(files.version))
        for each in replicas:
            each.serves = False
            each.forgive()
        joining = [each.joining for each in replicas if each.joining is not None]
        for task in joining:
            task.cancel()
        await asyncio.gather(*joining, return_exceptions=True)
        await asyncio.gather(*(each.update(files) for each in replicas))
        self._follow()
        self._changed.set()
        for each in replicas:
            if each.fault is not None:
                _log.warning(
                    "%s is left out, it does not serve policy %s: %s", each.url, files.version[:12], each.fault
                )
        if not self.serving():
            raise self._nobody()
        _log.info("%d of %d servers serve policy %s", len(self.serving()), len(replicas), files.version[:12])

    def _doubt(self) -> None:
        """Serve nothing until the servers are updated, in the background."""
        self._router.serve(Namespace(self._files.version))
        for each in self._replicas.values():
            each.serves = False
            each.forgive()
        self._follow()
        self._rejoin()

    async def _found(self) -> None:
        """Resolve the addresses. Waits for a server behind a name to reply, whose pod may have just been created."""
        names = any(each.is_name for each in self._config.addresses())
        began = reported = time.monotonic()
        while True:
            why = await self._resolved()
            if not names and self._scale is None:
                return
            if self._replicas and await _any_healthy(list(self._replicas)):
                return
            now = time.monotonic()
            if now - began > self._config.startup_timeout_s:
                cluster = await asyncio.to_thread(self._scale.words) if self._scale is not None else ""
                raise EngineUnreachable(
                    f"no server of {self._config.base_url} replied within {self._config.startup_timeout_s:g} s"
                    f" ({why or ', '.join(self._replicas)}){f'; the cluster says: {cluster}' if cluster else ''}:"
                    " correct engine.base_url, or raise engine.startup_timeout_s"
                )
            if now - reported > REPORT_S:
                reported = now
                cluster = await asyncio.to_thread(self._scale.words) if self._scale is not None else ""
                _log.info("waiting for a server of %s: %.0f s %s", self._config.base_url, now - began, cluster or why)
            await asyncio.sleep(1.0)

    async def _resolved(self) -> str:
        """Add the servers of new addresses, and forget those whose address is gone. Returns what failed, in words."""
        try:
            found = await asyncio.to_thread(resolve, self._config.addresses())
        except InfraFault as error:
            return str(error)
        urls = [each.url for each in found]
        for url in urls:
            if url not in self._replicas:
                self._replicas[url] = Replica(self._config, url, self._files, self._preparer)
        for url in set(self._replicas) - set(urls):
            if not self._replicas[url].serves and not self._replicas[url].in_flight:
                await self._replicas.pop(url).close()
        return ""

    async def _watch(self) -> None:
        """Check the servers, and take back those that were left out."""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                async with self._lock:
                    if any(each.is_name for each in self._config.addresses()):
                        await self._resolved()
                    serving = [each for each in self._replicas.values() if each.serves]
                    self._rejoin()
                await asyncio.gather(*(self._check(each) for each in serving))
            except (TriplaneError, OSError) as error:
                _log.warning("the watch of %s failed and goes on: %s", self._config.base_url, error)

    async def _check(self, replica: Replica) -> None:
        try:
            await replica.engine.check(CHECK_S)
        except EngineUnreachable as error:
            misses = self._misses[replica.url] = self._misses.get(replica.url, 0) + 1
            if misses >= MISSES:
                self._leave_out(replica, error)
                replica.abandon()
        except EngineError as error:
            self._leave_out(replica, error)
        else:
            self._misses[replica.url] = 0

    def _leave_out(self, replica: Replica, error: Exception) -> None:
        if replica.serves:
            _log.warning("%s is left out until it is updated and verified again: %s", replica.url, error)
            replica.leave_out(error)
            self._follow()
            self._changed.set()
        self._rejoin()

    def _follow(self) -> None:
        """Route to the servers that serve, and follow their cache events, and of no others."""
        self._router.serve_at(self.serving())
        self._events.sync({url: url for url in self.serving()})

    def _rejoin(self) -> None:
        """Update servers that were left out, in the background."""
        for replica in self._replicas.values():
            if replica.is_due() and not self._closed and self._started:
                replica.joining = asyncio.create_task(self._join(replica))

    async def _join(self, replica: Replica) -> None:
        await replica.update(self._files)
        if replica.serves:
            self._misses[replica.url] = 0
            self._follow()
            _log.info("%s serves policy %s", replica.url, self._files.version[:12])
        self._changed.set()

    def _nobody(self) -> TriplaneError:
        """Error that names the fault of each server; of their common type, if there is one."""
        urls: dict[str, list[str]] = {}
        for each in self._replicas.values():
            urls.setdefault(str(each.fault or "it is being updated"), []).append(each.url)
        text = "; ".join(f"{', '.join(group)}: {fault}" for fault, group in urls.items())
        said = f"none of {len(self._replicas)} server(s) serves policy {self._files.version[:12]}: {text}"
        return common_error(said, (each.fault for each in self._replicas.values()))


async def give_back_fleet(config: VllmConfig) -> None:
    """Free the GPUs of a fleet until the next lease, as `engine.idle` says. Raises EngineError, InfraFault."""
    if config.idle == "scale" and config.statefulset is not None:
        await asyncio.to_thread(Scale(config.statefulset).set, 0)
        return
    if config.idle != "sleep":
        return
    urls = [each.url for each in await asyncio.to_thread(resolve, config.addresses())]
    outcomes = await asyncio.gather(*(_sleep(config, url) for url in urls), return_exceptions=True)
    for url, outcome in zip(urls, outcomes, strict=True):
        if isinstance(outcome, EngineUnreachable):
            _log.warning("%s can't be put to sleep: %s", url, outcome)
        elif isinstance(outcome, BaseException):
            raise outcome


async def _sleep(config: VllmConfig, url: str) -> None:
    client = JsonClient(url, timeout_s=config.timeout_s, retries=config.retries)
    try:
        await put_to_sleep(client, config.drain_s)
    finally:
        await client.close()


async def _any_healthy(urls: Sequence[str]) -> bool:
    """Whether a server passes its health check."""

    async def healthy(url: str) -> bool:
        client = JsonClient(url)
        try:
            return await client.is_healthy("/health", CHECK_S)
        finally:
            await client.close()

    return any(await asyncio.gather(*(healthy(url) for url in urls)))
