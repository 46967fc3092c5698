"""An iteration launched by hand, and one partition of one asset made again."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from ops.graph import PER_ITERATION
from tests.acceptance.laboratory import Laboratory
from tests.browser.desk import LOCATION, Screen
from tests.webserver import ask
from triplane_dagster.iterations import next_partition

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


def test_an_iteration_launched_from_the_dialog_is_followed_to_success(screen: Screen, lab: Laboratory) -> None:
    screen.open(f"/locations/{LOCATION}/jobs/tiny_iteration")
    screen.page.get_by_role("button", name="Materialize all").click()
    partition = next_partition(lab.store, lab.experiment)
    run = screen.launch_partition(partition, new=True)
    screen.keep("run-started")
    screen.await_success()
    screen.page.reload()  # Dagster's chart of steps may stay empty on a page that followed the run
    expect(screen.page.get_by_text("tiny__sampler").first).to_be_visible()
    screen.keep("run-success")
    assert lab.artifact("sampler", partition).meta["decision"] == "live"
    screen.open("/runs")
    expect(screen.page.get_by_role("link", name=run)).to_be_visible()
    expect(screen.page.get_by_text(f"partition: {partition}")).to_be_visible()


@pytest.mark.parametrize("asset", ["rollouts", "dataset"])
def test_a_partition_made_again_redoes_nothing_and_leaves_the_rest_fresh(
    screen: Screen, lab: Laboratory, asset: str
) -> None:
    kinds = ("group", "rollouts", "rewards", "dataset", "checkpoint")
    before, committed = lab.digests(*kinds), lab.artifact(asset, "0001").manifest.created_unix
    screen.open_asset("tiny", asset)
    screen.page.get_by_role("button", name="Materialize").first.click()
    run = screen.launch_partition("0001", new=False)
    screen.await_success()
    screen.open(f"/assets/tiny/{asset}?view=partitions&partition=0001")
    expect(screen.page.get_by_role("link", name=run)).to_be_visible()
    if asset == "rollouts":
        key = screen.page.get_by_text("groups sampled by this run", exact=True)
        expect(key.locator("xpath=ancestor-or-self::td[1]/following-sibling::td[1]")).to_have_text("0")
    screen.keep(f"repeat-{asset}", height=2000)
    assert lab.digests(*kinds) == before
    assert lab.artifact(asset, "0001").manifest.created_unix == committed
    assert staleness(screen.url, "0001") == dict.fromkeys(PER_ITERATION, "FRESH")


def staleness(url: str, partition: str) -> dict[str, str]:
    """What the server thinks of each asset of an iteration of tiny: FRESH, STALE or MISSING."""
    keys = ", ".join(f'{{ path: ["tiny", "{asset}"] }}' for asset in PER_ITERATION)
    query = f'{{ assetNodes(assetKeys: [{keys}]) {{ assetKey {{ path }} staleStatus(partition: "{partition}") }} }}'
    return {node["assetKey"]["path"][-1]: node["staleStatus"] for node in ask(url, query)["assetNodes"]}
