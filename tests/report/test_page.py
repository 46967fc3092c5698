"""The page is safe against what it shows, needs no network, and stays small."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

from report_world import HOSTILE

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
        {"id": "data", "type": "application/octet-stream"},
        {},
    ]
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
