"""A run that is killed between the decision and the report is not forgotten: the same command makes the report, and no
further iteration.
"""

from __future__ import annotations

from pathlib import Path

from contracts.artifacts import ArtifactRef
from contracts.store import open_store
from resources.experiment import load_experiment
from resources.refs import write_ref
from triplane_dagster.iterations import is_complete
from triplane_dagster.targets import begin_target, end_target

TINY = Path(__file__).parents[1] / "dagster" / "tiny.yaml"


def test_iteration_without_report_is_not_complete(tmp_path: Path) -> None:
    store, tiny = open_store(str(tmp_path)), load_experiment(TINY)
    target = begin_target(store, tiny, 1)
    for asset, complete in (("sampler", False), ("report", True)):
        write_ref(store, tiny.name, asset, "0000", ArtifactRef(kind=asset, key="2" * 64, digest="3" * 64))
        assert is_complete(store, tiny, "0000") is complete
        assert begin_target(store, tiny, 1).iterations() == target.iterations() == ["0000"]
    end_target(store, tiny, target)
    assert begin_target(store, tiny, 1).iterations() == ["0001"]
