"""Counts of a bridge, and its Prometheus metrics.

bridge_episodes{phase}                episodes that are open, and turns of them that are being sampled (stepping)
bridge_episodes_closed_total{how}     episodes that were ended, aborted, or expired with their lease
bridge_turns_total{finish}            turns by how they ended, in the words of bridge.proto
bridge_tokens_total                   tokens that the policy sampled
bridge_first_token_seconds            time from a step to its first token
bridge_turn_seconds                   time from a step to the end of its turn, the environment's reply included
bridge_refused_total{error}           commands and calls that ended with an error, by its name
bridge_journal_bytes_total            bytes written to the journal
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from contracts.rpc.scraping import Endpoint

BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, float("inf"))


@dataclass
class Times:
    """Histogram of durations in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * len(BUCKETS))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds


@dataclass
class Counts:
    """What a bridge has done. Counting needs no package and costs less than a microsecond."""

    closed: Counter[str] = field(default_factory=Counter)
    turns: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    journal_bytes: int = 0
    first_token: Times = field(default_factory=Times)
    turn: Times = field(default_factory=Times)


class Metrics:
    """Reports counts at each scrape."""

    def __init__(self, counts: Counts, phases: Callable[[], dict[str, int]]) -> None:
        """phases: number of episodes by phase; called in the endpoint's threads. Raises ConfigError."""
        self._endpoint = Endpoint()
        self._endpoint.registry.register(_Collector(counts, phases))
        self.start, self.stop = self._endpoint.start, self._endpoint.stop


class _Collector:
    def __init__(self, counts: Counts, phases: Callable[[], dict[str, int]]) -> None:
        self._counts, self._phases = counts, phases

    def describe(self) -> Iterable[Any]:
        """No metrics at registration; `collect` gives all of them."""
        return ()

    def collect(self) -> Iterator[Any]:
        """See prometheus_client.registry.Collector."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        counts = self._counts
        for kind, name, words, label, values in (
            (GaugeMetricFamily, "bridge_episodes", "Episodes by phase", "phase", self._phases()),
            (CounterMetricFamily, "bridge_episodes_closed", "Episodes that were closed", "how", counts.closed),
            (CounterMetricFamily, "bridge_turns", "Turns that ended", "finish", counts.turns),
            (CounterMetricFamily, "bridge_refused", "Commands and calls that failed", "error", counts.refused),
        ):
            family = kind(name, words, labels=(label,))
            for value, amount in sorted(dict(values).items()):
                family.add_metric((value,), amount)
            yield family
        yield CounterMetricFamily("bridge_tokens", "Tokens that the policy sampled", counts.tokens)
        yield CounterMetricFamily("bridge_journal_bytes", "Bytes written to the journal", counts.journal_bytes)
        for name, words, times in (
            ("bridge_first_token_seconds", "Time from a step to its first token", counts.first_token),
            ("bridge_turn_seconds", "Time from a step to the end of its turn", counts.turn),
        ):
            running, buckets = 0, []
            for bound, count in zip(BUCKETS, times.counts, strict=True):
                running += count
                buckets.append(("+Inf" if bound == BUCKETS[-1] else f"{bound:g}", running))
            yield HistogramMetricFamily(name, words, buckets=buckets, sum_value=times.total)
