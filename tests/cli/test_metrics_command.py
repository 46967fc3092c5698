"""`triplane metrics`: what dumps say, checked against hand-made ones and a real endpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest
from typer.testing import CliRunner

from contracts.rpc.scraping import Endpoint
from triplane_dagster.cli.app import app
from triplane_dagster.metric_dumps import Buckets, DumpError, read_dump, summarize

RUNNER = CliRunner()


def rows(*arguments: str) -> dict[str, dict[str, Any]]:
    done = RUNNER.invoke(app, ["metrics", *arguments, "--json"])
    assert done.exit_code == 0, done.output
    return {f"{row['metric']} {row['labels']}".strip(): row for row in json.loads(done.stdout)}


def dump(registry: CollectorRegistry, path: Path) -> str:
    path.write_bytes(generate_latest(registry))
    return str(path)


def test_two_dumps_say_what_happened_between_them(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    calls = Counter("calls", "c", ("code",), registry=registry)
    open_now = Gauge("open", "g", registry=registry)
    seconds = Histogram("seconds", "h", buckets=(1, 2, 4), registry=registry)
    size = Summary("size", "s", registry=registry)
    calls.labels("OK").inc(7)
    open_now.set(5)
    seconds.observe(100)
    before = dump(registry, tmp_path / "before")
    calls.labels("OK").inc(3)
    calls.labels("NOT_FOUND").inc(2)
    open_now.set(1)
    size.observe(8)
    for value in (0.5, 1.5, 1.5, 3):
        seconds.observe(value)
    after = dump(registry, tmp_path / "after")
    found = rows(before, after, "--seconds", "10")
    assert found["calls_total code=OK"]["value"] == 10 and found["calls_total code=OK"]["change"] == 3
    assert found["calls_total code=OK"]["per_second"] == pytest.approx(0.3)
    assert found["calls_total code=NOT_FOUND"]["change"] == 2, "a series that is new counts from zero"
    assert found["open"]["change"] == -4 and found["open"]["per_second"] is None
    assert found["seconds"]["value"] == 5 and found["seconds"]["change"] == 4
    assert found["seconds"]["mean"] == pytest.approx(6.5 / 4), "the observation before is left out"
    assert found["seconds"]["p50"] == pytest.approx(1.5)
    assert found["size"]["change"] == 1 and found["size"]["mean"] == 8 and found["size"]["p50"] is None
    assert set(rows(before, "--match", "calls*")) == {"calls_total code=OK"}


def test_a_program_that_began_anew_counts_from_zero(tmp_path: Path) -> None:
    for name, calls, count in (("before", 100, 50), ("after", 4, 2)):
        (tmp_path / name).write_text(
            f"# TYPE calls_total counter\ncalls_total {calls}\n# TYPE s histogram\n"
            f's_bucket{{le="1"}} {count}\ns_bucket{{le="+Inf"}} {count}\ns_sum {count}\ns_count {count}\n'
        )
    found = rows(str(tmp_path / "before"), str(tmp_path / "after"))
    assert found["calls_total"]["change"] == 4 and found["s"]["change"] == 2


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_quantiles_are_within_their_bucket(share: float) -> None:
    drawn, bounds = np.random.default_rng(5).exponential(1.0, 2000), [*np.linspace(0.05, 20, 400), np.inf]
    found = Buckets({bound: float((drawn <= bound).sum()) for bound in bounds}, len(drawn)).quantile(share)
    assert found == pytest.approx(float(np.quantile(drawn, share)), abs=0.06)


def test_what_no_bucket_bounds_is_the_last_bound() -> None:
    assert Buckets({1.0: 1, float("inf"): 10}, 10).quantile(0.9) == 1.0
    assert np.isnan(Buckets({1.0: 0, float("inf"): 0}, 0).quantile(0.5))


def test_an_endpoint_is_read_twice() -> None:
    endpoint = Endpoint()
    calls = endpoint.prometheus.Counter("calls", "c", registry=endpoint.registry)
    calls.inc(5)
    port = endpoint.start("127.0.0.1:0")
    address = f"http://127.0.0.1:{port}/metrics"
    try:
        found = rows(address, "--seconds", "0.2")
        with pytest.raises(DumpError, match="a port is at most 65535"):
            read_dump(f"http://127.0.0.1:{port + 65536}/metrics")
    finally:
        endpoint.stop()
    assert found["calls_total"]["value"] == 5 and found["calls_total"]["change"] == 0
    with pytest.raises(DumpError, match="does not answer with metrics"):
        read_dump(address)


@pytest.mark.parametrize(
    "text",
    ["", "no metrics here, only words\n", "<html>\n", 'a{b="c 1\n', "a one\n", 'h_bucket{le="x"} 1\n', "\x00\x01"],
)
def test_what_is_no_dump_is_one_clear_error(tmp_path: Path, text: str) -> None:
    source = tmp_path / "dump"
    source.write_text(("# TYPE h histogram\n" if "le=" in text else "") + text)
    done = RUNNER.invoke(app, ["metrics", str(source)])
    assert done.exit_code == 1 and str(source) in done.output and "Traceback" not in done.output
    assert "/metrics" in done.output


def test_a_file_that_is_not_there_and_one_of_other_bytes_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9 1\n")
    for name in ("gone", "latin"):
        with pytest.raises(DumpError, match=name):
            read_dump(str(tmp_path / name))


def test_a_dump_alone_is_its_values(tmp_path: Path) -> None:
    (tmp_path / "dump").write_text("# TYPE g gauge\ng NaN\nuntyped 3 1700000000000\n")
    found = summarize(read_dump(str(tmp_path / "dump")))
    assert [row["metric"] for row in found] == ["g", "untyped"] and found[1]["value"] == 3.0
