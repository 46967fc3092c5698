"""One laboratory, one `triplane ui` and one Chromium for all browser tests; a tab each. Screenshots:
$TRIPLANE_SCREENSHOTS, else .test-output/browser.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from tests.acceptance.laboratory import ROOT, Laboratory
from tests.browser.desk import HEIGHT, WIDTH, Brakes, Screen, prepare, running_ui
from tests.needs import require


@pytest.fixture(scope="session")
def lab(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    """$TRIPLANE_DESK names a folder to keep it in, and to find it in again."""
    kept = os.environ.get("TRIPLANE_DESK")
    return prepare(Path(kept) if kept else tmp_path_factory.mktemp("desk"))


@pytest.fixture(scope="session")
def ui(lab: Laboratory) -> Iterator[str]:
    with running_ui(lab) as url:
        yield url


@pytest.fixture
def brakes(lab: Laboratory) -> Iterator[Brakes]:
    brakes = Brakes(lab.folder / "brakes")
    yield brakes
    brakes.release()


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    require("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        expect.set_options(timeout=60_000)  # a busy machine
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def shots() -> Path:
    folder = Path(os.environ.get("TRIPLANE_SCREENSHOTS") or ROOT / ".test-output" / "browser")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def screen(ui: str, chromium: Browser, shots: Path, request: pytest.FixtureRequest) -> Iterator[Screen]:
    """A fresh tab. The test fails when a script of a page did."""
    context = chromium.new_context(viewport={"width": WIDTH, "height": HEIGHT})
    context.set_default_timeout(60_000)
    screen = Screen(context.new_page(), ui, shots)
    screen.page.on("pageerror", lambda error: screen.complaints.append(str(error)))
    yield screen
    screen.keep(f"end-{request.node.name.removeprefix('test_')}")
    context.close()
    assert not screen.complaints
