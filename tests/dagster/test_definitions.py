from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from ops.graph import ONCE, PER_ITERATION
from resources.errors import ExperimentError
from triplane_dagster.assembly import load_definitions
from triplane_dagster.definitions import defs
from triplane_dagster.experiment_files import load_folder

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


def test_a_broken_file_is_an_asset_that_says_why_and_the_others_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"a": "name: same", "b": "name: same", "bad-one": "name: [", "bad_one": "nme: x", "same": "name: Bad"}
    texts |= {"a_copy": "name: mine\nseed: 7", "mine": "name: mine"}
    for file, text in texts.items():
        (tmp_path / f"{file}.yaml").write_text(f"{text}\n")
    monkeypatch.setenv("TRIPLANE_EXPERIMENTS", str(tmp_path))
    loaded = load_definitions()
    dg.Definitions.validate_loadable(loaded)
    graph = loaded.resolve_asset_graph()
    broken = {key.path[0]: graph.get(key) for key in graph.get_all_asset_keys() if key.path[1] == "experiment_file"}
    said = {"a": "both called same", "b": "both called same", "bad_one": "not YAML", "bad_one_2": "nme", "same": "Bad"}
    said["a_copy"] = "both called mine"
    assert set(broken) == set(said)
    for group, text in said.items():
        assert text in (broken[group].description or "") and broken[group].group_name == group
        with pytest.raises(ExperimentError, match=text):
            dg.materialize([loaded.resolve_assets_def([group, "experiment_file"])])
    assert {key.path[1] for key in graph.get_all_asset_keys() if key.path[0] == "mine"} == {*ONCE, *PER_ITERATION}
    assert [each.name for each in load_folder(tmp_path).experiments] == ["mine"]
