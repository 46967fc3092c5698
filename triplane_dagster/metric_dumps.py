"""Dumps of Prometheus metrics, as text: what one says, and what happened between two.

read_dump -> Dump (labelled series by name) -> summarize: a row for each series
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contracts.errors import TriplaneError
from contracts.rpc.scraping import prometheus_client

Labels = tuple[tuple[str, str], ...]
QUANTILES = (0.5, 0.9, 0.99)
DUMP_BYTES = 256 << 20
"""Longest dump that is read from an address."""


class DumpError(TriplaneError):
    """A dump can't be read."""


@dataclass
class Buckets:
    """A histogram, or a difference of two."""

    counts: dict[float, float] = field(default_factory=dict)
    """Upper bound -> observations up to it."""
    count: float = 0.0
    total: float = math.nan
    """Sum of the observations; NaN if the dump has none."""

    def quantile(self, share: float) -> float:
        """Value below which this share of the observations is, linear within its bucket; NaN without observations.

        As PromQL's histogram_quantile: beyond the last finite bound, that bound.
        """
        bounds, wanted, below, start = sorted(self.counts), share * self.count, 0.0, 0.0
        if not self.count or not bounds:
            return math.nan
        for bound in bounds:
            here = self.counts[bound]
            if here >= wanted and here > below:
                if math.isinf(bound):
                    return start
                return start + (bound - start) * (wanted - below) / (here - below)
            below, start = here, bound if math.isfinite(bound) else start
        return start


@dataclass(frozen=True)
class Dump:
    """All series of a dump."""

    values: Mapping[tuple[str, Labels], float]
    """Counters, gauges and untyped series, and quantiles of summaries."""
    counters: frozenset[str]
    """Names of the counters among them."""
    histograms: Mapping[tuple[str, Labels], Buckets]
    """Histograms and summaries; these have no buckets."""


def read_dump(source: str, timeout_s: float = 10.0) -> Dump:
    """Dump in a file or at an http(s) address. Raises DumpError, and ConfigError without prometheus-client."""
    prometheus_client()
    from prometheus_client.parser import text_string_to_metric_families

    values: dict[tuple[str, Labels], float] = {}
    histograms: dict[tuple[str, Labels], Buckets] = {}
    counters: set[str] = set()
    try:
        for family in text_string_to_metric_families(_text(source, timeout_s)):
            for sample in family.samples:
                _add(family.type, sample, values, counters, histograms)
    except (ValueError, KeyError, IndexError) as error:
        raise DumpError(f"{source} is no dump of Prometheus metrics ({error}): save the text of /metrics") from None
    if not values and not histograms:
        raise DumpError(f"{source} has no metrics: save the text of /metrics")
    return Dump(values, frozenset(counters), histograms)


def _text(source: str, timeout_s: float) -> str:
    if not source.startswith(("http://", "https://")):
        try:
            return Path(source).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise DumpError(f"{source} can't be read ({error}): name a file, or the http address of /metrics") from None
    import httpx

    from contracts.replies import bounded_client

    try:
        if (httpx.URL(source).port or 0) > 65535:  # which httpx would wrap around
            raise httpx.InvalidURL("a port is at most 65535")
        with bounded_client(DUMP_BYTES, timeout=timeout_s, follow_redirects=True) as client:
            return client.get(source).raise_for_status().text
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise DumpError(f"{source} does not answer with metrics ({error}): check the address and its path") from None


def _add(
    kind: str,
    sample: Any,
    values: dict[tuple[str, Labels], float],
    counters: set[str],
    histograms: dict[tuple[str, Labels], Buckets],
) -> None:
    name, labels, value = str(sample.name), dict(sample.labels), float(sample.value)
    if name.endswith("_created"):
        return
    if kind in ("histogram", "summary"):
        for suffix in ("_bucket", "_count", "_sum"):
            if name.endswith(suffix):
                bound = labels.pop("le", "")
                found = histograms.setdefault((name.removesuffix(suffix), _labels(labels)), Buckets())
                if suffix == "_bucket":
                    found.counts[float(bound)] = value
                elif suffix == "_count":
                    found.count = value
                else:
                    found.total = value
                return
    if kind == "counter":
        counters.add(name)
    values[name, _labels(labels)] = value


def _labels(labels: Mapping[str, str]) -> Labels:
    return tuple(sorted(labels.items()))


def summarize(dump: Dump, before: Dump | None = None, seconds: float | None = None) -> list[dict[str, Any]]:
    """A row for each series of `dump`, in order of names and labels. before: an earlier dump of the same program:
    counters and histograms are then those of the time between, which is `seconds` long, if that is known.

    A counter that is lower than before has begun anew with its program: all of it counts, as in PromQL.
    """
    return [*_value_rows(dump, before, seconds), *_histogram_rows(dump, before, seconds)]


def _value_rows(dump: Dump, before: Dump | None, seconds: float | None) -> Iterator[dict[str, Any]]:
    for (name, labels), value in sorted(dump.values.items()):
        row = _row(name, labels)
        row["value"] = value
        if before is not None:
            counts = name in dump.counters
            earlier = before.values.get((name, labels), 0.0 if counts else math.nan)
            more = value if counts and value < earlier else value - earlier
            row["change"] = more
            row["per_second"] = more / seconds if counts and seconds else math.nan
        yield row


def _histogram_rows(dump: Dump, before: Dump | None, seconds: float | None) -> Iterator[dict[str, Any]]:
    for (name, labels), now in sorted(dump.histograms.items(), key=lambda item: item[0]):
        found = now if before is None else _difference(now, before.histograms.get((name, labels)))
        row = _row(name, labels)
        row["value"] = now.count
        if before is not None:
            row["change"] = found.count
            row["per_second"] = found.count / seconds if seconds else math.nan
        row["mean"] = found.total / found.count if found.count else math.nan
        row |= {f"p{100 * share:g}": found.quantile(share) for share in QUANTILES}
        yield row


def _row(name: str, labels: Labels) -> dict[str, Any]:
    return {"metric": name, "labels": " ".join(f"{key}={value}" for key, value in labels)}


def _difference(now: Buckets, before: Buckets | None) -> Buckets:
    """Observations since `before`; all of them if the program began anew."""
    if before is None or now.count < before.count:
        return now
    counts = {bound: count - before.counts.get(bound, 0.0) for bound, count in now.counts.items()}
    return Buckets(counts, now.count - before.count, now.total - before.total)


def columns(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give all rows the same keys, as a table needs them. NaN and missing values become None."""
    found = list(rows)
    names = list(dict.fromkeys(name for row in found for name in row))
    return [{name: _number(row.get(name)) for name in names} for row in found]


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value
