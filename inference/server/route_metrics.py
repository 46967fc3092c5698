"""Prometheus metrics of the router's HTTP face, as text at http://HOST:PORT/metrics.

route_requests_total{replica,code}   replies passed on, by HTTP status; replica is "none" where no one could be asked
route_seconds{path}                  time from a request to the end of its reply
route_prompt_tokens_total            tokens of prompts, or words of 4 bytes of text
route_cached_tokens_total            those that the chosen replica was expected to have
route_repeats_total                  requests that were sent to another replica after a fault
route_replicas{state}                replicas that serve, and that are left out
route_flying_tokens{replica}         tokens of requests in flight
route_event_batches_total{result}    batches of cache events: applied, lost; orphans are blocks
route_shared_total{result}           with --redis: entries sent, received, unreadable; news dropped; failures of Redis
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from contracts.rpc.scraping import prometheus_client

_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)


@dataclass(frozen=True)
class Look:
    """State of a router at a scrape."""

    states: Mapping[str, int]
    """Number of replicas by state."""
    flying: Mapping[str, float]
    """Tokens in flight by replica."""
    batches: Mapping[str, int]
    """Batches of cache events by result."""
    shared: Mapping[str, int]
    """Entries of the Redis stream by result."""


class RouteMetrics:
    """Counts requests, and reports the router's state at each scrape."""

    def __init__(self, look: Callable[[], Look]) -> None:
        """look: called in the event loop's thread. Raises ConfigError without prometheus-client."""
        self._prometheus = prometheus_client()
        self._registry = self._prometheus.CollectorRegistry()
        self.requests = self._counter("route_requests", "Replies passed on", "replica", "code")
        self.prompt_tokens = self._counter("route_prompt_tokens", "Tokens of prompts")
        self.cached_tokens = self._counter("route_cached_tokens", "Tokens of prompts expected to be cached")
        self.repeats = self._counter("route_repeats", "Requests sent to another replica after a fault")
        self.seconds = self._prometheus.Histogram(
            "route_seconds", "Time of requests", ("path",), buckets=_BUCKETS, registry=self._registry
        )
        self._registry.register(_State(look))

    def text(self) -> bytes:
        """All metrics, in Prometheus' text format."""
        return bytes(self._prometheus.generate_latest(self._registry))

    def _counter(self, name: str, words: str, *labels: str) -> Any:
        return self._prometheus.Counter(name, words, labels, registry=self._registry)


class _State:
    def __init__(self, look: Callable[[], Look]) -> None:
        self._look = look

    def describe(self) -> Iterable[Any]:
        """No metrics at registration; `collect` gives all of them."""
        return ()

    def collect(self) -> Iterator[Any]:
        """See prometheus_client.registry.Collector."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        found = self._look()
        for kind, name, words, label, values in (
            (GaugeMetricFamily, "route_replicas", "Replicas", "state", found.states),
            (GaugeMetricFamily, "route_flying_tokens", "Tokens of requests in flight", "replica", found.flying),
            (CounterMetricFamily, "route_event_batches", "Batches of cache events", "result", found.batches),
            (CounterMetricFamily, "route_shared", "Entries shared through Redis", "result", found.shared),
        ):
            family = kind(name, words, labels=(label,))
            for value, amount in values.items():
                family.add_metric((value,), amount)
            yield family
