"""The benchmarks' frame: goals as data, verdicts, and the command line around a benchmark."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks import catalog
from benchmarks.__main__ import main
from benchmarks.goals import Goal, check_goals, load_goals
from benchmarks.measure import median, percentile
from benchmarks.result import Options, Result
from contracts.errors import ConfigError


class SquareOptions(Options):
    """Options of a benchmark small enough to test the frame with."""

    side: int = 3
    """Length of a side."""


def square(options: SquareOptions) -> Result:
    area = float(options.side**2)
    return Result({"create_p50_ms": area, "verify_p50_ms": area}, [{"side": options.side, "area": area}], ["a note"])


@pytest.fixture
def square_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frame with `square` in the place of the sandbox benchmark, judged by goals of its own (15 and 60 ms)."""
    loaded = catalog.Benchmark("envd", SquareOptions, square)  # type: ignore[arg-type]
    monkeypatch.setattr("benchmarks.__main__.load_benchmark", lambda name: loaded)
    goals = [goal("<=", 15, "create_p50_ms"), goal("<=", 60, "verify_p50_ms")]
    monkeypatch.setattr("benchmarks.__main__.load_goals", lambda: {"envd": goals})


def goal(comparison: str, value: float, metric: str = "m") -> Goal:
    return Goal.model_validate(
        {"name": "g", "metric": metric, "comparison": comparison, "value": value, "unit": "ms", "why": "a test"}
    )


def test_every_benchmark_of_the_catalog_has_goals_and_no_other_has() -> None:
    goals = load_goals()
    assert set(goals) == set(catalog.CATALOG) and all(goals.values())


@given(st.floats(allow_nan=False), st.floats(allow_nan=False, allow_infinity=False))
@example(15.0, 15.0)
def test_a_goal_is_met_when_the_measured_value_compares_so_with_the_goals(measured: float, value: float) -> None:
    goals = [goal(comparison, value) for comparison in ("<", "<=", "==", ">=", ">")]
    met = [verdict.met for verdict in check_goals(goals, {"m": measured})]
    assert met == [measured < value, measured <= value, measured == value, measured >= value, measured > value]


def test_a_metric_that_was_not_measured_misses_its_goal() -> None:
    assert not check_goals([goal("<", 1)], {})[0].met
    assert not check_goals([goal("<", 1)], {"m": math.nan})[0].met


def test_a_malformed_goals_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "goals.yaml"
    path.write_text("engine:\n  - {name: x, metric: y, comparison: '~', value: 1, unit: s, why: z}\n")
    with pytest.raises(ConfigError, match=r"goals\.yaml.*comparison"):
        load_goals(path)


def test_met_goals_exit_0_and_a_missed_goal_exits_1(square_benchmark: None) -> None:
    assert main(["envd"]) == 0
    assert main(["envd", "--side", "4"]) == 1
    assert main(["envd", "--side", "4", "--no-gate"]) == 0


def test_json_holds_options_machine_metrics_and_goals(
    square_benchmark: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["envd", "--json", "--side", "8"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["options"] == {"side": 8}
    assert printed["metrics"]["create_p50_ms"] == 64
    assert [each["met"] for each in printed["goals"]] == [False, False]
    assert printed["passed"] is False
    assert printed["machine"]["cores"] >= 1
    assert printed["machine"]["versions"]["pyarrow"]


def test_a_wrong_option_value_is_one_line_that_names_it(
    square_benchmark: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["envd", "--side", "wide"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: --side=wide") and error.count("\n") == 1


def test_an_unknown_benchmark_is_named_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speed"]) == 1
    assert "'speed'" in (error := capsys.readouterr().err) and "learning" in error


def test_listing_needs_no_torch_and_shows_every_goal() -> None:
    script = (
        "import sys; from benchmarks.__main__ import main; main(['list', '--json']); assert 'torch' not in sys.modules"
    )
    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert {row["benchmark"] for row in json.loads(printed)} == set(catalog.CATALOG)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1))
def test_percentiles_lie_within_the_values_and_the_middle_is_the_median(values: list[float]) -> None:
    assert percentile(values, 0) == min(values)
    assert percentile(values, 100) == max(values)
    assert math.isclose(percentile(values, 50), median(values), rel_tol=1e-9, abs_tol=1e-6)
