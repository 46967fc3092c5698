"""A running `triplane ui` and the screen of somebody who sits before it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

from tests.acceptance.laboratory import ROOT, Laboratory
from tests.webserver import wait_until_up

TINY = ROOT / "tests" / "dagster" / "tiny.yaml"
LOCATION = "triplane_dagster.definitions"
WIDTH, HEIGHT = 1600, 1100
PATIENCE_S = 240.0
"""A busy machine takes this long to load the definitions, or to run an iteration."""
PATIENCE_MS = 1000 * PATIENCE_S
SETTLING_MS = 3000
ORDER = (
    "task_suite",
    "iteration_inputs",
    "prompts",
    "rollouts",
    "rewards",
    "dataset",
    "checkpoint",
    "evaluation",
    "sampler",
    "report",
)
"""One path through the graph, from left to right."""


@dataclass
class Screen:
    """One browser tab on the UI. Keeps screenshots, and what the page's scripts complained of."""

    page: Page
    url: str
    shots: Path
    complaints: list[str] = field(default_factory=list)

    def open(self, path: str) -> None:
        self.page.goto(f"{self.url}{path}")

    def open_asset(self, experiment: str, asset: str) -> None:
        """The asset's page, once it shows what was last materialized."""
        self.open(f"/assets/{experiment}/{asset}")
        expect(self.page.get_by_text("Latest materialization")).to_be_visible()
        expect(self.value_of("digest")).to_be_visible()

    def value_of(self, key: str) -> Locator:
        """The cell of the metadata table two to the right of `key`: key, time, value."""
        cell = self.page.get_by_role("cell", name=key, exact=True)
        return cell.locator("xpath=following-sibling::*[2]").first

    def keep(self, name: str, height: int = HEIGHT) -> None:
        """Write a screenshot for people. height: of the window while it is taken, in pixels."""
        self.page.set_viewport_size({"width": WIDTH, "height": height})
        self.page.screenshot(path=self.shots / f"{name}.png")
        self.page.set_viewport_size({"width": WIDTH, "height": HEIGHT})

    def launch_partition(self, partition: str, *, new: bool) -> str:
        """Fill the open launch dialog, launch, and go to the run's page. Returns the run's short id."""
        dialog = self.page.get_by_role("dialog").filter(has_text="Launch runs to materialize")
        chosen = dialog.get_by_text("1 partition", exact=True)
        if new:
            dialog.get_by_text("Add a partition").click()
            naming = self.page.get_by_role("dialog").filter(has_text="Partition name")
            naming.get_by_role("textbox").fill(partition)
            naming.get_by_role("button", name="Save").click()
            expect(naming).to_be_hidden()
            self.page.wait_for_timeout(SETTLING_MS)
        if not chosen.is_visible():  # Dagster drops what was chosen before the dialog had loaded
            dialog.get_by_text("Select a partition or create one").click()
            menu = self.page.get_by_role("menuitem", name=partition).or_(
                self.page.get_by_role("option", name=partition)
            )
            menu.first.click()
            self.page.keyboard.press("Escape")
        expect(chosen).to_be_visible()
        self.keep("dialog-new" if new else "dialog-again")
        dialog.get_by_role("button", name="Launch 1 run").click()
        toast = self.page.get_by_text(re.compile("Launched run [0-9a-f]{8}"))
        expect(toast).to_be_visible()
        found = re.search("Launched run ([0-9a-f]{8})", toast.inner_text())
        assert found is not None
        self.page.get_by_text("View", exact=True).last.click()
        expect(self.page).to_have_url(re.compile(f"/runs/{found[1]}"))
        return found[1]

    def await_success(self) -> None:
        """Watch the open run's page until it says Success; a failure ends the wait."""
        status = self.page.get_by_text(re.compile("^(Success|Failure|Canceled)$")).first
        expect(status).to_be_visible(timeout=PATIENCE_MS)
        assert status.inner_text() == "Success"


def prepare(folder: Path) -> Laboratory:
    """A folder with three experiments: tiny ran twice, refusing once (it learns nothing and says so), quickstart
    never.
    """
    lab = Laboratory(folder, folder / "experiments" / "tiny.yaml", environment={"OMP_NUM_THREADS": "1"})
    lab.environment["TRIPLANE_EXPERIMENTS"] = str(lab.experiment_file.parent)
    if lab.experiment_file.exists():
        return lab
    lab.experiment_file.parent.mkdir()
    shutil.copy(ROOT / "workspace.yaml", folder)
    shutil.copy(ROOT / "experiments" / "quickstart.yaml", lab.experiment_file.parent)
    tiny = TINY.read_text()
    lab.experiment_file.write_text(tiny)
    refusing = tiny.replace("name: tiny", "name: refusing")
    refusing = refusing.replace("drop_zero_variance: false", "drop_zero_variance: true")
    (lab.experiment_file.parent / "refusing.yaml").write_text(refusing)
    lab.run("iterate", "-e", "tiny", "-n", "2")
    lab.run("iterate", "-e", "refusing", "-n", "1")
    return lab


@contextmanager
def running_ui(lab: Laboratory) -> Iterator[str]:
    """`triplane ui` in a laboratory's folder, ended as a service manager ends it. Yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    log = lab.folder / "ui.log"
    with log.open("wb") as sink:
        child = subprocess.Popen(
            lab.command("ui", "--port", str(port)),
            cwd=lab.folder,
            env=lab.env,
            stdout=sink,
            stderr=sink,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        wait_until_up(f"http://127.0.0.1:{port}", child, log, PATIENCE_S)
        yield f"http://127.0.0.1:{port}"
    finally:
        child.terminate()
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(10)
