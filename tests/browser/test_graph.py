"""The asset graph of an experiment, before and after it ran."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.desk import LOCATION, ORDER, Screen

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


@pytest.mark.parametrize("experiment", ["tiny", "quickstart"])
def test_the_graph_shows_every_asset_in_order(screen: Screen, experiment: str) -> None:
    screen.open(f"/locations/{LOCATION}/asset-groups/{experiment}/lineage")
    lefts = []
    for asset in ORDER:
        node = screen.page.get_by_text(asset, exact=True).last
        expect(node).to_be_visible()
        box = node.bounding_box()
        assert box is not None
        lefts.append(box["x"])
    assert lefts == sorted(lefts), dict(zip(ORDER, lefts, strict=True))
    expect(screen.page.get_by_text("base_policy", exact=True).last).to_be_visible()
    expect(screen.page.get_by_text(re.compile("error|failed", re.IGNORECASE))).to_have_count(0)
    screen.keep(f"graph-{experiment}")


def test_each_experiment_is_a_group_of_the_whole_graph(screen: Screen) -> None:
    screen.open("/asset-groups")
    for experiment in ("tiny", "quickstart", "refusing"):
        expect(screen.page.get_by_text(experiment, exact=True).last).to_be_visible()
    screen.keep("graph-all")


def test_an_asset_chosen_in_the_graph_is_described_beside_it(screen: Screen) -> None:
    screen.open(f"/locations/{LOCATION}/asset-groups/tiny/lineage")
    screen.page.get_by_text("rollouts", exact=True).last.click()
    expect(screen.page.get_by_text("Episodes of the acting policy in sandboxes", exact=False).first).to_be_visible()
    screen.keep("graph-chosen")
