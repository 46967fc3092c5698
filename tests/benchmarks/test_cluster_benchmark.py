"""The `cluster` benchmark: what its model makes of unit costs, how it counts calls, and where sandboxes go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cluster import OPTIONS, run
from benchmarks.cluster_costs import Costs, S3Costs, read_costs
from benchmarks.cluster_fleet import simulate
from benchmarks.cluster_limits import LARGEST, Limit, first_broken, limits_of, reached
from benchmarks.cluster_measure import by_resource, by_source
from benchmarks.cluster_model import Assumptions, Load, Size, dns_bytes, load_of, size_of

GIVEN = Assumptions()


@pytest.fixture(scope="module")
def costs() -> Costs:
    return read_costs()


def limit(most: float, breaks: bool = True) -> Limit:
    return Limit("GPUs", most, lambda load: load.size.gpus, "", "", "", breaks)


def test_requests_are_divided_among_iteration_group_and_episode() -> None:
    def made(groups: int, size: int) -> dict[str, int]:
        return {"PUT": 7 + 5 * groups + 3 * groups * size, "LIST": 4}

    sizes = [(2, 2), (2, 2), (8, 2), (2, 6)]
    fitted = S3Costs.fitted([(each, made(*each)) for each in sizes], 12.0)
    assert fitted.episode == pytest.approx({"PUT": 3, "LIST": 0})
    assert fitted.group == pytest.approx({"PUT": 5, "LIST": 0})
    assert fitted.iteration == pytest.approx({"PUT": 7, "LIST": 4})


def test_costs_read_back_as_written(costs: Costs, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs.write(path)
    assert read_costs(path) == costs


def test_calls_are_counted_by_who_makes_them_and_by_right() -> None:
    jobs, core = "/apis/batch/v1/namespaces/triplane/jobs", "/api/v1/namespaces/triplane"
    calls = [
        ("POST", jobs),
        ("GET", f"{jobs}/dagster-step-1/status"),
        ("GET", f"{jobs}/dagster-run-1/status"),
        ("GET", jobs),
        ("GET", f"{jobs}/train-1"),
        ("GET", f"{core}/pods"),
        ("GET", f"{core}/pods/train-1-0/log"),
        ("DELETE", f"{jobs}/train-1"),
    ]
    assert by_source(calls) == {"create": 1, "step poll": 1, "run poll": 1, "orphans": 1, "train": 4}
    assert by_resource(calls) == {
        "create jobs": 1,
        "get jobs/status": 2,
        "list jobs": 1,
        "get jobs": 1,
        "list pods": 1,
        "get pods/log": 1,
        "delete jobs": 1,
    }


def test_a_dns_reply_fits_a_udp_packet_of_28_servers() -> None:
    assert dns_bytes(28) <= 512 < dns_bytes(29)


def test_load_grows_with_experiments_and_rows_with_iterations(costs: Costs) -> None:
    one, eight = (load_of(size_of(64 * count, 64), costs, GIVEN) for count in (1, 8))
    assert eight.api_minute - eight.api["sensor of orphans"] == pytest.approx(
        8 * (one.api_minute - one.api["sensor of orphans"])
    )
    assert eight.rows_night == pytest.approx(8 * one.rows_night)
    slower = load_of(size_of(64, 64), costs, replace(GIVEN, iteration_minutes=30))
    assert slower.rows_night == pytest.approx(one.rows_night / 2)


def test_more_shards_are_more_steps(costs: Costs) -> None:
    few, many = (load_of(Size(64, 1, sandboxes), costs, GIVEN) for sandboxes in (512, 1024))
    assert many.steps - few.steps == pytest.approx(2 * costs.postgres.steps_shard)
    assert many.api["steps: health checks"] == pytest.approx(2 * few.api["steps: health checks"])


@pytest.mark.parametrize(("most", "gpus"), [(7, 8), (8, 16), (511, 512), (512, 520), (2.0 * LARGEST, None)])
def test_the_fewest_gpus_that_exceed_a_limit_are_found(costs: Costs, most: float, gpus: int | None) -> None:
    assert reached(limit(most), costs, GIVEN, 64).gpus == gpus


def test_what_only_gets_slower_is_not_what_breaks_first(costs: Costs) -> None:
    found = [reached(each, costs, GIVEN, 64) for each in (limit(10, breaks=False), limit(300), limit(100))]
    first = first_broken(found)
    assert first is not None and first.limit.most == 100


def test_every_limit_uses_more_at_a_larger_size(costs: Costs) -> None:
    small, large = (load_of(size_of(gpus, gpus), costs, GIVEN) for gpus in (8, 1 << 20))
    larger = load_of(size_of(1 << 20, 64), costs, GIVEN)
    for each in limits_of(costs, GIVEN):
        assert max(each.used(large), each.used(larger)) > each.used(small) >= 0, each.name


def test_clients_that_know_nothing_of_each_other_fill_servers_evenly() -> None:
    spread = simulate(2_000, 10, 8)
    assert spread.connections == 10
    assert 250 <= spread.most <= 1.1 * spread.mean
    assert spread.lost == spread.most, "the fullest server is lost"
    assert 2_000 / 7 <= spread.most_after <= 1.1 * 2_000 / 7, "its sandboxes start again on the others"


def test_recorded_costs_give_a_whole_report() -> None:
    result = run(OPTIONS(measure=False))
    rows = {row["quantity"]: row for row in result.rows}
    assert rows["experiments side by side"] == {
        "quantity": "experiments side by side",
        "8 GPUs": 1,
        "64 GPUs": 1,
        "512 GPUs": 8,
    }
    assert result.notes[-1].startswith("first: ")


def test_a_load_is_named_by_its_sources(costs: Costs) -> None:
    load: Load = load_of(size_of(8, 64), costs, GIVEN)
    assert load.api_minute == pytest.approx(sum(load.api.values()))
