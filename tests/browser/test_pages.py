"""What an asset's page tells: metadata, samples, links, plots, checks and decisions."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.acceptance.laboratory import Laboratory
from tests.browser.desk import Screen

LINE_DRAWN = """canvas => {
    const dots = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    let coloured = 0;
    for (let at = 0; at < dots.length; at += 4) {
        const [red, green, blue, shown] = dots.slice(at, at + 4);
        coloured += shown > 200 && Math.max(red, green, blue) - Math.min(red, green, blue) > 80;
    }
    return coloured > 100;
}"""
"""Axes and labels are grey: only a line has colour."""

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


def test_metadata_names_content_rows_columns_and_parents(screen: Screen, lab: Laboratory) -> None:
    rollouts = lab.artifact("rollouts", "0001")
    screen.open_asset("tiny", "rollouts")
    expect(screen.value_of("digest")).to_have_text(re.compile("[0-9a-f]{64}"))
    expect(screen.page.get_by_text("Row count")).to_be_visible()
    expect(screen.page.get_by_role("row").filter(has_text="policy_tokens").first).to_contain_text("int32")
    expect(screen.page.get_by_text("Content digest of the acting checkpoint.")).to_be_visible()
    parents = screen.value_of("parents")
    for role in sorted(rollouts.manifest.parents):
        expect(parents).to_contain_text(role)
    screen.keep("page-rollouts", height=2600)


def test_sample_episodes_are_rendered_line_by_line(screen: Screen) -> None:
    screen.open_asset("tiny", "rewards")
    screen.value_of("samples").get_by_text("Show Markdown").click()
    dialog = screen.page.get_by_role("dialog")
    expect(dialog).to_contain_text("triplane episodes show")
    assert dialog.locator("pre").first.inner_text().startswith("<|im_start|>user\nfix ")
    assert dialog.locator("strong").count() == dialog.locator("pre").count() > 1
    assert "&lt;" not in dialog.inner_text()
    screen.keep("page-samples")


def test_a_link_leads_to_the_asset_it_names(screen: Screen) -> None:
    screen.open_asset("tiny", "dataset")
    screen.value_of("rewards").get_by_role("link").click()
    expect(screen.page).to_have_url(re.compile("/assets/tiny/rewards"))
    expect(screen.page.get_by_text("Reward and its components for every episode")).to_be_visible()


@pytest.mark.parametrize(
    ("asset", "numbers"),
    [
        ("rollouts", ["tokens per second", "policy tokens per episode"]),
        ("rewards", ["reward mean", "pass rate"]),
        ("evaluation", ["gate candidate pass rate", "held-out difference"]),
        ("checkpoint", ["loss", "KL to the acting policy", "tokens per second"]),
    ],
)
def test_plots_draw_a_line_over_iterations(screen: Screen, asset: str, numbers: list[str]) -> None:
    screen.open_asset("tiny", asset)
    screen.page.get_by_role("button", name="Plots").click()
    for name in numbers:
        title = screen.page.get_by_text(name, exact=True).first
        title.scroll_into_view_if_needed()
        plot = title.locator("xpath=following::canvas[1]")
        expect(plot).to_be_visible()
        screen.page.wait_for_function(LINE_DRAWN, arg=plot.element_handle())
    screen.keep(f"plots-{asset}", height=2600)


def test_a_failed_check_and_a_refusal_are_told_in_words(screen: Screen) -> None:
    screen.open("/assets/refusing/dataset?view=checks")
    screen.page.get_by_text("has_something_to_learn_from").first.click()
    expect(screen.page.get_by_text("At least one sequence was kept.")).to_be_visible()
    expect(screen.page.get_by_text("Failed", exact=True).first).to_be_visible()
    expect(screen.page.get_by_text("24 of 24 episodes were left out, most often for zero variance.")).to_be_visible()
    screen.keep("check-failed")
    screen.open_asset("refusing", "sampler")
    expect(screen.value_of("decision")).to_have_text("refused")
    reasons = screen.value_of("reasons")
    expect(reasons).to_contain_text("candidate equals its parent: nothing was learned")
    screen.keep("decision-refused")
