"""The report opens from the running UI and shows every episode; what a policy wrote stays text."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect

from contracts.store import open_store
from ops.report.build import commit_report
from ops.report.history import earlier_rows
from ops.report.sources import find_sources
from tests.acceptance.laboratory import Laboratory
from tests.browser.desk import Screen
from tests.cli.cli_history import EXPERIMENT
from tests.report.report_world import HOSTILE, write_world

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]


@pytest.fixture(scope="session")
def addresses(lab: Laboratory, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Reports of a made-up history, one plain and one hostile, put into the laboratory's store: iteration -> path."""
    store = open_store(str(tmp_path_factory.mktemp("made-up")))
    write_world(store)
    found = {}
    for iteration in ("0000", "0001"):
        sources = find_sources(store, EXPERIMENT, iteration)
        made = commit_report(sources, earlier_rows(store, EXPERIMENT, iteration), {})
        shutil.copytree(Path(store.url) / made.ref.uri, Path(lab.store.url) / made.ref.uri)
        found[iteration] = f"/reports/{made.ref.key}"
    return found


def test_the_assets_page_opens_the_report(screen: Screen, lab: Laboratory) -> None:
    screen.open_asset("tiny", "report")
    screen.keep("page-report")
    screen.page.get_by_role("link", name="Open the report of tiny").click()
    expect(screen.page.locator("html")).to_have_attribute("data-ready", "yes")
    expect(screen.page.get_by_role("heading", name="Curves")).to_be_visible()
    expect(screen.page.get_by_role("img", name="Pass rate")).to_be_visible()
    screen.keep("report-top")


def test_an_episode_is_searched_chosen_and_read(screen: Screen, addresses: dict[str, str]) -> None:
    screen.open(addresses["0000"])
    page = screen.page
    episodes = page.get_by_role("listbox", name="Episodes")
    expect(episodes.get_by_role("option").first).to_be_visible()
    everything = episodes.get_by_role("option").count()
    page.get_by_role("searchbox", name="Search").fill("no such words anywhere")
    expect(page.get_by_text("No episode answers to this.")).to_be_visible()
    page.get_by_role("button", name="clear").click()
    expect(episodes.get_by_role("option")).to_have_count(everything)
    episodes.get_by_role("option").last.click()
    detail = page.get_by_role("article")
    for title in ("Transcript", "Tool calls", "Final diff", "Hidden tests", "Lineage"):
        expect(detail.get_by_role("heading", name=title)).to_be_visible()
    expect(page).to_have_url(re.compile("#episode=[0-9a-f]+"))
    tints = "tokens => [...new Set(tokens.map(token => token.style.background))]"
    assert detail.locator(".token").evaluate_all(tints) == [""]
    detail.get_by_role("button", name="by logprob").click()
    assert "" not in detail.locator(".token").evaluate_all(tints)
    expect(detail.get_by_role("button", name=re.compile("triplane lineage [0-9a-f]+"))).to_be_visible()
    screen.keep("report-episode")


def test_hostile_text_stays_text(screen: Screen, addresses: dict[str, str]) -> None:
    said: list[str] = []
    screen.page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
    screen.open(addresses["0001"])
    expect(screen.page.locator("html")).to_have_attribute("data-ready", "yes")
    screen.page.get_by_role("listbox", name="Episodes").get_by_role("option").first.click()
    turns = screen.page.get_by_role("article").locator(".turn")
    assert turns.evaluate_all("nodes => nodes.map(n => n.className)") == [
        "turn prompt",
        "turn policy",
        "turn environment",
    ]
    assert turns.nth(1).locator(".token.forced").count() > 3, "forced tokens stand in the policy's turn"
    shown = screen.page.locator("body").inner_text()
    assert "<img src=x onerror=alert(2)>" in shown and "⟨202E⟩" in shown and "\u202e" not in shown
    assert "Reward components" in shown and "no value" in shown
    assert HOSTILE not in screen.page.content()
    assert screen.page.locator("img, iframe, object").count() == 0 and screen.page.locator("script").count() == 2
    handlers = "nodes => nodes.flatMap(n => [...n.attributes]).filter(a => a.name.startsWith('on')).length"
    assert screen.page.locator("*").evaluate_all(handlers) == 0
    assert not said


def test_a_report_could_not_act_on_the_server_it_came_from(screen: Screen, addresses: dict[str, str]) -> None:
    screen.open(addresses["0001"])
    assert screen.page.evaluate("origin") == "null"
    answer = httpx.get(screen.url + addresses["0001"])
    assert "sandbox" in answer.headers["content-security-policy"]
    assert "allow-same-origin" not in answer.headers["content-security-policy"]


@pytest.mark.parametrize("key", ["0" * 64, "xyz"])
def test_what_is_no_report_is_not_found(ui: str, key: str) -> None:
    assert httpx.get(f"{ui}/reports/{key}").status_code == 404
