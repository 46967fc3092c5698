from pathlib import Path

import dagster as dg
import pytest

from contracts.store import open_store
from ops import step as steps
from ops.graph import ROLLOUTS
from ops.step import begin
from resources.experiment import Experiment
from resources.progress import Progress


@pytest.mark.parametrize(("every_s", "observations"), [(0.0, 3), (3600.0, 0)])
def test_progress_reaches_the_sink_always_and_dagster_sometimes(
    every_s: float, observations: int, tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "OBSERVE_EVERY_S", every_s)
    heard: list[Progress] = []

    @dg.op
    def work(context: dg.OpExecutionContext) -> None:
        step = begin(context, tiny, ROLLOUTS, open_store(str(tmp_path)), heard.append)
        for done in range(3):
            step.progress.update("sampling", done, 3, tokens_per_second=10.0 * done)

    @dg.job
    def once() -> None:
        work()

    with dg.DagsterInstance.ephemeral() as instance:
        once.execute_in_process(instance=instance)
        records = instance.fetch_observations(dg.AssetKey([tiny.name, "rollouts"]), limit=10).records
    assert [update.done for update in heard] == [0, 1, 2]
    assert len(records) == observations
    if records:
        observed = records[0].asset_observation
        assert observed is not None
        assert {name: value.value for name, value in observed.metadata.items()} == {
            "sampling done": 2.0,
            "tokens per second": 20.0,
        }
