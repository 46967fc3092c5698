"""The page is safe against what it shows, needs no network, and stays small."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_world import HOSTILE, World

from ops.report.page import SCRIPTS, read_data, render

WEB = Path(__file__).parents[2] / "ops" / "report" / "web"


class Elements(HTMLParser):
    """What a browser makes of a page before its script runs."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_hostile_text_is_data_and_never_markup(hostile_page: bytes) -> None:
    page = hostile_page.decode()
    elements = Elements(page)
    assert [attributes for tag, attributes in elements.tags if tag == "script"] == [
        {"id": "data", "type": "application/octet-stream"}, {}
    ]  # fmt: skip
    assert not [tag for tag, _ in elements.tags if tag in ("img", "iframe", "object", "link", "base", "form")]
    assert "alert" not in page
    shown = read_data(hostile_page)["viewer"]["episodes"][0]
    assert HOSTILE in shown["family"] and HOSTILE in shown["calls"][0]["name"]


def test_only_the_pages_own_script_and_style_may_run(hostile_page: bytes) -> None:
    page = hostile_page.decode()
    policy = next(attributes["content"] for tag, attributes in Elements(page).tags if "http-equiv" in attributes)
    assert policy is not None and "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    for tag, name in (("script", "script-src"), ("style", "style-src")):
        body = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert len(body) == 1
        digest = base64.b64encode(hashlib.sha256(body[0].encode()).digest()).decode()
        assert f"{name} 'sha256-{digest}'" in policy


def test_the_script_has_no_way_to_make_markup_of_text() -> None:
    script = "".join((WEB / name).read_text() for name in SCRIPTS)
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "DOMParser",
        "srcdoc",
        "</",
        "<!--",
    ):
        assert way not in script, way
    assert not re.findall(
        r"https?://(?!www\.w3\.org/2000/svg)", script + (WEB / "page.html").read_text() + (WEB / "page.css").read_text()
    )


def test_a_name_cannot_break_out_of_the_title(hostile_page: bytes) -> None:
    data = read_data(hostile_page) | {"experiment": HOSTILE}
    assert HOSTILE not in render(data).decode()


def test_equal_data_makes_equal_pages(hostile_page: bytes) -> None:
    assert render(read_data(hostile_page)) == hostile_page


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_a_browser_shows_hostile_text_as_text(world: World, page_file: Path, tmp_path: Path) -> None:
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update --disable-sync"
    command = [
        "chromium", *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=5000", "--dump-dom",
        page_file.as_uri(),
    ]  # fmt: skip
    drawn = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    elements = Elements(drawn)
    assert 'data-ready="yes"' in drawn
    assert len([tag for tag, _ in elements.tags if tag == "script"]) == 2
    assert not [
        tag for tag, attributes in elements.tags if tag == "img" or any(name.startswith("on") for name in attributes)
    ]
    text = "".join(elements.texts)
    assert "<img src=x onerror=alert(2)>" in text and "⟨202E⟩" in text and "\u202e" not in text
    assert world.hostile[0].episode_id in text
