"""Prometheus metrics of a server, as text on http://HOST:PORT/metrics.

envd_calls_total{method,code}          ended calls; Sandboxes/Create with another code than OK is a failed creation
envd_call_seconds{method}              duration of calls: Sandboxes/Create, Verifier/Verify, Files/Read ...
envd_tool_seconds{tool}                duration of tool batches with one kind of tool: exec, read ...; mixed: several
envd_sandboxes{backend,state}          sandboxes that exist now
envd_sandboxes_memory_bytes{backend}   memory that they use together; likewise _pids, _cpu_seconds
envd_pool_takes_total{backend,result}  creations that found a ready sandbox (hit) or none (miss)
envd_egress_connections                current connections of sandboxes through their proxies
envd_egress_bytes_total{direction}     bytes sent and received by sandboxes, over connections that have ended
envd_audit_events_total{kind}          denials, limits hit, tampering, including suppressed events
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any

from contracts.rpc.scraping import Endpoint
from envd.backends.base import Usage
from envd.errors import EnvdError
from envd.tools import ALL_TOOLS

if TYPE_CHECKING:
    from envd.server.audit import AuditLog
    from envd.server.sandboxes import Sandboxes

_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_USAGE_S = 5.0
"""Maximum time, in seconds, that a scrape waits for the sandboxes' usage."""
_STATES = ("running", "paused", "hibernated")


class Metrics:
    """Metrics endpoint: counts calls, and reports sandboxes at each scrape. Listens from `start` to `stop`."""

    def __init__(self, sandboxes: Sandboxes, audit: AuditLog) -> None:
        """Raises ConfigError without the package prometheus-client."""
        endpoint = Endpoint()
        self.start, self.stop = endpoint.start, endpoint.stop
        prometheus, registry = endpoint.prometheus, endpoint.registry
        self._calls = prometheus.Counter("envd_calls", "Calls ended", ("method", "code"), registry=registry)
        self._seconds = prometheus.Histogram(
            "envd_call_seconds", "Time of calls", ("method",), buckets=_BUCKETS, registry=registry
        )
        self._tools = prometheus.Histogram(
            "envd_tool_seconds", "Time of tool batches", ("tool",), buckets=_BUCKETS, registry=registry
        )
        # cached, since looking up a label costs more than counting; methods and codes are few
        self._count, self._time = functools.cache(self._calls.labels), functools.cache(self._seconds.labels)
        registry.register(_Living(sandboxes, audit, asyncio.get_running_loop()))

    def begin(self, method: str, request: Any, context: Any) -> Callable[[str], None]:
        """See `envd.server.observing.Observer`."""
        started = time.perf_counter()
        tool = _tool_of(request) if method == "Tools/Batch" and request is not None else None

        def end(code: str) -> None:
            seconds = time.perf_counter() - started
            self._count(method, code).inc()
            self._time(method).observe(seconds)
            if tool is not None:
                self._tools.labels(tool).observe(seconds)

        return end


def _tool_of(request: Any) -> str:
    names = {call.name for call in request.calls}
    if len(names) != 1:
        return "mixed"
    name = str(names.pop())
    return name if name in ALL_TOOLS else "unknown"


class _Living:
    """Collector of the sandboxes and their usage at each scrape. Called in the threads of the HTTP server."""

    def __init__(self, sandboxes: Sandboxes, audit: AuditLog, loop: asyncio.AbstractEventLoop) -> None:
        self._sandboxes, self._audit, self._loop = sandboxes, audit, loop

    def describe(self) -> Iterable[Any]:
        """No metrics at registration; `collect` gives all of them."""
        return ()

    def collect(self) -> Iterator[Any]:
        """See prometheus_client.registry.Collector."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counts, usage = self._look()
        states = GaugeMetricFamily("envd_sandboxes", "Sandboxes that exist", labels=("backend", "state"))
        for backend in self._sandboxes.backends:
            for state in _STATES:
                states.add_metric((backend, state), counts[backend, state])
        yield states
        for name, words, part in (
            ("envd_sandboxes_memory_bytes", "Memory of the live sandboxes", "memory_bytes"),
            ("envd_sandboxes_pids", "Processes of the live sandboxes", "pids"),
            ("envd_sandboxes_cpu_seconds", "Processor time used so far by the live sandboxes", "cpu_s"),
        ):
            family = GaugeMetricFamily(name, words, labels=("backend",))
            for backend in self._sandboxes.backends:
                family.add_metric((backend,), sum(getattr(each, part) for each in usage.get(backend, ())))
            yield family
        pools = CounterMetricFamily(
            "envd_pool_takes", "Creations that asked the warm pool", labels=("backend", "result")
        )
        for name, found in self._sandboxes.backends.items():
            pool = getattr(found, "pool", None)
            if pool is not None:
                pools.add_metric((name, "hit"), pool.hits)
                pools.add_metric((name, "miss"), pool.misses)
        yield pools
        egress = self._sandboxes.egress
        yield GaugeMetricFamily("envd_egress_connections", "Connections of sandboxes' proxies", egress.connections)
        moved = CounterMetricFamily("envd_egress_bytes", "Bytes of sandboxes' proxies", labels=("direction",))
        moved.add_metric(("sent",), egress.sent)
        moved.add_metric(("received",), egress.received)
        yield moved
        events = CounterMetricFamily("envd_audit_events", "Audit events", labels=("kind",))
        for kind, count in sorted(dict(self._audit.counts).items()):
            events.add_metric((kind,), count)
        yield events

    def _look(self) -> tuple[Counter[tuple[str, str]], Mapping[str, list[Usage]]]:
        """Number of sandboxes by backend and state, and usages by backend; both empty if the event loop does not answer
        within _USAGE_S seconds.
        """
        asked = asyncio.run_coroutine_threadsafe(_look_at(self._sandboxes), self._loop)
        try:
            return asked.result(_USAGE_S)
        except (FutureTimeout, RuntimeError):
            asked.cancel()
            return Counter(), {}


async def _look_at(sandboxes: Sandboxes) -> tuple[Counter[tuple[str, str]], dict[str, list[Usage]]]:
    live = sandboxes.all({})
    counts = Counter((each.backend.name, str(each.state)) for each in live)
    found: dict[str, list[Usage]] = {}
    for each in live:
        if each.box is None:
            continue
        try:
            found.setdefault(each.backend.name, []).append(await each.box.usage())
        except (EnvdError, OSError):
            continue  # the sandbox is ending
        await asyncio.sleep(0)  # lets calls run in between
    return counts, found
