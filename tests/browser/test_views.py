"""What the UI shows of a history: partitions, a night that was refused, what an edit made stale, and a comparison."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from ops.graph import PER_ITERATION
from tests.acceptance.laboratory import Laboratory
from tests.browser.desk import LOCATION, PATIENCE_MS, Screen
from tests.browser.test_launch import staleness

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]
REFUSED = "iteration 0000 is refused and promotion.on_refusal is stop: launch refusing_train by hand"


@pytest.fixture
def edited(lab: Laboratory) -> Iterator[None]:
    """The experiment's file, with another filter for the dataset."""
    written = lab.experiment_file.read_text()
    lab.experiment_file.write_text(written.replace("drop_zero_variance: false", "drop_zero_variance: true"))
    assert lab.experiment_file.read_text() != written
    yield
    lab.experiment_file.write_text(written)


def test_partitions_of_an_asset_are_the_iterations(screen: Screen) -> None:
    screen.open("/assets/tiny/sampler?view=partitions&partition=0001")
    for partition in ("0000", "0001"):
        expect(screen.page.get_by_text(partition, exact=True).first).to_be_visible()
    expect(screen.page.get_by_text("Missing (0)")).to_be_visible()
    row = screen.page.get_by_role("row").filter(has_text="decision")
    expect(row.first).to_contain_text("live")
    screen.keep("partitions")


def test_a_night_after_a_refusal_is_skipped_and_says_why(screen: Screen) -> None:
    screen.open(f"/locations/{LOCATION}/schedules/refusing_nightly")
    switch = screen.page.get_by_role("checkbox")
    turn = screen.page.locator("label").filter(has=switch)
    if not switch.is_checked():
        turn.click()
        expect(switch).to_be_checked()
    tick = screen.page.get_by_role("button", name="0 runs requested").first
    expect(tick).to_be_visible(timeout=PATIENCE_MS)  # it has one every minute
    expect(switch).to_be_enabled()
    turn.click()
    expect(switch).not_to_be_checked()
    tick.click()
    dialog = screen.page.get_by_role("dialog")
    expect(dialog).to_contain_text(f"Skip reason: {REFUSED}")
    screen.keep("night-refused")


def test_an_edited_filter_makes_the_datasets_stale_and_nothing_else(screen: Screen, edited: None) -> None:
    """What follows is stale once the dataset is another one."""
    reload_definitions(screen)
    for partition in ("0000", "0001"):
        shown = staleness(screen.url, partition)
        assert {asset for asset in PER_ITERATION if shown[asset] != "FRESH"} == {"dataset"}, shown
    for asset, tags in (("dataset", 1), ("checkpoint", 0)):
        screen.open(f"/assets/tiny/{asset}?view=partitions&partition=0001")
        expect(screen.page.get_by_text("Latest materialization")).to_be_visible()
        expect(screen.page.get_by_text(re.compile("^Unsynced"))).to_have_count(tags)
        screen.keep(f"stale-{asset}")


def test_the_file_as_it_was_is_fresh_again(screen: Screen) -> None:
    reload_definitions(screen)
    assert set(staleness(screen.url, "0001").values()) == {"FRESH"}


def test_a_comparison_draws_and_lists_both_experiments(screen: Screen, lab: Laboratory, tmp_path: Path) -> None:
    page = tmp_path / "compared.html"
    lab.run("compare", "tiny", "refusing", "--output", str(page))
    screen.page.goto(page.as_uri())
    expect(screen.page.get_by_role("heading", name="tiny, refusing compared")).to_be_visible()
    for reading in ("held-out, greedy", "held-out, sampled", "unseen, greedy", "unseen, sampled"):
        picture = screen.page.get_by_role("figure", name=reading).locator("img")
        assert picture.evaluate("image => image.complete && image.naturalWidth > 100")
        row = screen.page.get_by_role("row").filter(has_text="0000 / 0000").filter(has_text=reading)
        expect(row).to_contain_text("tasks")
    screen.keep("comparison")


def reload_definitions(screen: Screen) -> None:
    """Reload the code location, as after an edit of an experiment's file."""
    screen.open("/locations")
    screen.page.get_by_role("button").filter(has_text=re.compile("^Reload$")).click()
    expect(screen.page.get_by_text(re.compile("reloaded", re.IGNORECASE)).first).to_be_visible(timeout=PATIENCE_MS)
