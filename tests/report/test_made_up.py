"""A run that is killed between the decision and the report is not forgotten: the same command makes the report, and no further iteration."""

from __future__ import annotations

from pathlib import Path

from contracts.artifacts import ArtifactRef
from contracts.store import open_store
from resources.experiment import load_experiment
from resources.refs import write_ref
from triplane_dagster.targets import begin_target

TINY = Path(__file__).parents[1] / "dagster" / "tiny.yaml"


def test_a_decided_iteration_without_report_is_still_to_do(tmp_path: Path) -> None:
    store, tiny = open_store(str(tmp_path)), load_experiment(TINY)
    first = begin_target(store, tiny, 1)
    for asset, expected in (("sampler", ["0000"]), ("report", ["0001"])):
        write_ref(store, tiny.name, asset, "0000", ArtifactRef(kind=asset, key="2" * 64, digest="3" * 64))
        assert begin_target(store, tiny, 1).iterations() == expected
    assert first.iterations() == ["0000"]
