"""The job `NAME_data` of a pipeline's file."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest

from contracts.store import open_store
from curation.pipeline.versions import find_version
from tests.curation.pipelines import rows_of, world
from triplane_dagster.assembly import load_definitions

PIPELINE = """
name: even
key: id
workers: 1
source: {kind: parquet, path: rows.parquet}
stages: [{kind: where, predicate: "id % 2 = 0"}]
"""


def test_job_runs_a_pipeline_and_a_broken_file_is_an_asset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPLANE_EXPERIMENTS", str(tmp_path))
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    folder = world(tmp_path / "data")
    (folder / "even.yaml").write_text(PIPELINE)
    (folder / "broken.yaml").write_text("name: broken\n")
    definitions = load_definitions()
    with dg.DagsterInstance.ephemeral() as instance:
        done = definitions.resolve_job_def("even_data").execute_in_process(instance=instance)
        (event,) = done.asset_materializations_for_node("even_run_pipeline")
    assert event.asset_key == dg.AssetKey(["data", "even"]) and event.metadata["dagster/row_count"].value == 100
    assert event.metadata["1 where: left out, false"].value == 100
    found = find_version(open_store(str(tmp_path / "store")), "even@1")
    assert [row["id"] for row in rows_of(found.artifact)] == list(range(0, 200, 2))
    assert dg.AssetKey(["broken", "experiment_file"]) in definitions.resolve_all_asset_keys()
