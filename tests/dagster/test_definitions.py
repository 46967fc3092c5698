from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest

from contracts.artifacts import ArtifactRef
from contracts.store import open_store
from ops.graph import ONCE, PER_ITERATION
from resources.errors import ExperimentError
from resources.experiment import Experiment
from resources.refs import write_ref
from triplane_dagster.assembly import definitions_for, load_all
from triplane_dagster.definitions import defs
from triplane_dagster.jobs import EXPERIMENT_TAG, REMAINING_TAG, iteration_job, iteration_job_name
from triplane_dagster.schedules import nightly
from triplane_dagster.sensors import next_request

SHIPPED = ("quickstart", "qwen3_30b_a3b", "qwen3_30b_a3b_deepspeed", "qwen3_30b_a3b_te", "qwen3_4b")


def test_each_experiment_has_the_whole_graph_under_its_own_prefix() -> None:
    dg.Definitions.validate_loadable(defs)
    keys = {key.to_user_string() for key in defs.resolve_asset_graph().get_all_asset_keys()}
    assert keys == {f"{name}/{asset}" for name in SHIPPED for asset in (*ONCE, *PER_ITERATION)}


def test_every_asset_reads_well_in_the_ui() -> None:
    graph = defs.resolve_asset_graph()
    for key in graph.get_all_asset_keys():
        node = graph.get(key)
        assert node.description and node.owners and node.kinds and node.code_version, key
        assert node.group_name == key.path[0]


def test_every_asset_links_to_its_source() -> None:
    graph = defs.resolve_asset_graph()
    for key in graph.get_all_asset_keys():
        references = graph.get(key).metadata["dagster/code_references"].code_references
        assert [Path(each.file_path).name for each in references] == [f"{key.path[1]}.py"]


def test_partitions_never_mix_experiments() -> None:
    graph = defs.resolve_asset_graph()
    for key in graph.get_all_asset_keys():
        partitions = graph.get(key).partitions_def
        if key.path[1] in ONCE:
            assert partitions is None
        else:
            assert isinstance(partitions, dg.DynamicPartitionsDefinition) and partitions.name == key.path[0]


def test_jobs_never_retry_from_the_failed_step() -> None:
    for job in defs.resolve_all_job_defs():
        if job.name.endswith(("_base", "_iteration")):
            assert job.tags["dagster/retry_strategy"] == "ALL_STEPS"


def test_nothing_runs_by_the_clock_until_it_is_started() -> None:
    schedules = defs.get_repository_def().schedule_defs
    assert {schedule.name for schedule in schedules} == {f"{name}_nightly" for name in SHIPPED}
    assert {schedule.default_status for schedule in schedules} == {dg.DefaultScheduleStatus.STOPPED}


def test_two_files_with_one_name_are_refused(tmp_path: Path) -> None:
    for file in ("a.yaml", "b.yaml"):
        (tmp_path / file).write_text("name: same\n")
    with pytest.raises(ExperimentError, match="both called same"):
        load_all(tmp_path)


def decide(store_folder: Path, experiment: Experiment, iteration: str) -> None:
    """Make an iteration look finished."""
    decision = ArtifactRef(kind="sampler", key="2" * 64, digest="3" * 64)
    write_ref(open_store(str(store_folder)), experiment.name, "sampler", iteration, decision)


def test_the_schedule_asks_for_the_first_undecided_iteration(
    tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path))
    decide(tmp_path, tiny, "0000")
    repository = definitions_for([tiny]).get_repository_def()
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        context = dg.build_schedule_context(
            instance=instance, repository_def=repository, scheduled_execution_time=datetime(2030, 1, 2, 2, tzinfo=UTC)
        )
        request = nightly(tiny, iteration_job(tiny))(context)
        assert isinstance(request, dg.RunRequest) and request.partition_key == "0001"
        assert instance.get_dynamic_partitions(tiny.name) == ["0001"]


@pytest.mark.parametrize("remaining", ["0", "2", "nonsense"])
def test_a_run_with_some_remaining_is_followed_by_the_next(
    remaining: str, tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path))
    with dg.DagsterInstance.ephemeral() as instance:
        run = dg.DagsterRun(
            job_name=iteration_job_name(tiny),
            run_id="1" * 8,
            status=dg.DagsterRunStatus.SUCCESS,
            tags={REMAINING_TAG: remaining, EXPERIMENT_TAG: tiny.name, "dagster/partition": "0000"},
        )
        context = dg.build_run_status_sensor_context("tiny_sequence", event_of(run), instance, run)
        asked = next_request(context, tiny)
        if remaining != "2":
            assert isinstance(asked, dg.SkipReason)
            return
        assert isinstance(asked, dg.RunRequest)
        assert asked.tags[REMAINING_TAG] == "1"
        assert instance.has_dynamic_partition(tiny.name, str(asked.partition_key))


def event_of(run: dg.DagsterRun) -> dg.DagsterEvent:
    return dg.DagsterEvent(event_type_value="PIPELINE_SUCCESS", job_name=run.job_name)
