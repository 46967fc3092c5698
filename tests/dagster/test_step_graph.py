"""The declarations of the steps are what runs, what is planned and what artifacts say of themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from dagster_world import World

from assets import experiment_assets
from contracts.artifacts import Artifact, find_artifact
from contracts.store import open_store
from ops.graph import GRAPH, REPORT, REPORTED, graph_of
from ops.inputs import find_inputs
from ops.spec import StepSpec
from ops.state import IterationState
from resources.experiment import Experiment, parse_experiment
from resources.refs import read_artifact, read_ref
from triplane_dagster.dry_run import plan_of


@pytest.mark.parametrize("spec", GRAPH, ids=lambda spec: spec.name)
def test_an_artifact_has_the_key_lineage_and_version_of_its_declaration(ran: World, spec: StepSpec) -> None:
    for iteration in [None] if spec.once else ran.made:
        made = read_artifact(ran.store, ran.experiment.name, spec.name, iteration)
        assert made is not None and made.ref.kind == spec.writes
        refs = {each.name: read_ref(ran.store, ran.experiment.name, each.name, iteration) for each in GRAPH}
        refs |= {each.name: read_ref(ran.store, ran.experiment.name, each.name) for each in GRAPH if each.once}
        pinned = find_inputs(ran.store, ran.experiment, iteration) if iteration else None
        known = {name: ref for name, ref in refs.items() if ref is not None}
        state = IterationState(ran.experiment, ran.store, iteration, known, pinned)
        assert made.manifest.code_version == spec.version
        parents = {role: state.find(source) for role, source in spec.inputs.items()}
        assert parents.items() <= made.manifest.parents.items()
        if spec is not REPORT:
            assert spec.key(state) == made.ref.key
            assert record_of(ran, spec, made).manifest.config == spec.own_config(state)


def record_of(world: World, spec: StepSpec, made: Artifact) -> Artifact:
    """The artifact whose manifest records the settings of a step."""
    found = find_artifact(world.store, spec.recorded_by or made.ref.kind, made.ref.key)
    assert found is not None
    return found


def test_an_asset_requires_the_resources_that_its_step_needs(tiny: Experiment) -> None:
    shared = {"store", "progress", "io_manager"}
    for spec, asset in zip(graph_of(tiny), experiment_assets(tiny), strict=True):
        assert asset.key.path == [tiny.name, spec.name]
        assert asset.required_resource_keys - shared == set(spec.needs)
        assert {key.path[1] for key in asset.dependency_keys} == set(spec.upstream)


def test_the_report_lists_its_inputs_in_graph_order(ran: World) -> None:
    report = read_artifact(ran.store, ran.experiment.name, REPORT.name, "0001")
    assert report is not None
    assert [each["asset"] for each in report.json("summary.json")["inputs"]] == [spec.name for spec in REPORTED]


def test_a_dry_run_of_nothing_knows_the_keys_that_depend_on_nothing(tiny: Experiment, tmp_path: Path) -> None:
    rows = plan_of(tiny, open_store(str(tmp_path)))
    assert [row.step for row in rows] == [spec.name for spec in GRAPH]
    assert {row.step for row in rows if row.key} == {"task_suite", "iteration_inputs"}
    assert {row.state for row in rows} == {"will run"}


def test_an_imported_base_is_planned_as_an_import(tmp_path: Path) -> None:
    experiment = parse_experiment({"name": "one", "base": {"kind": "import", "path": "/models/qwen"}})
    (base,) = (row for row in plan_of(experiment, open_store(str(tmp_path))) if row.step == "base_policy")
    assert (base.key, base.where) == (None, "import of /models/qwen")
