"""A running `triplane ui` and the screen of somebody who sits before it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from playwright.sync_api import Locator, Page, Response, expect

from contracts.digests import file_sha256
from tests.acceptance.laboratory import ROOT, Laboratory
from tests.webserver import wait_until_up

BRAKING = Path(__file__).parent / "braking"
TINY = ROOT / "tests" / "dagster" / "tiny.yaml"
LOCATION = "triplane_dagster.definitions"
WIDTH, HEIGHT = 1600, 1100
PATIENCE_S = 240.0
"""A busy machine takes this long to load the definitions, or to run an iteration."""
PATIENCE_MS = 1000 * PATIENCE_S
SETTLING_MS = 3000
_DIALOG = "Launch runs to materialize"
_TITLES = re.compile(f"^({_DIALOG}|Delete tiny)")
_ENDED = re.compile("^(Success|Failure|Canceled)$")
_ERROR = re.compile(r"(?:resources|contracts)\.errors\.\w+: (.+)")
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
        dialog = self.page.get_by_role("dialog").filter(has_text=_DIALOG)
        if new:
            dialog.get_by_text("Add a partition").click()
            naming = self.page.get_by_role("dialog").filter(has_text="Partition name")
            naming.get_by_role("textbox").fill(partition)
            naming.get_by_role("button", name="Save").click()
            expect(naming).to_be_hidden()
        self._choose_for_launch(dialog, partition)
        self.keep("dialog-new" if new else "dialog-again")
        dialog.get_by_role("button", name="Launch 1 run").click()
        return self._go_to_launched()

    def launch_backfill(self, *partitions: str) -> None:
        """Choose the partitions in the open launch dialog, launch, and go to the backfill's page."""
        dialog = self.page.get_by_role("dialog").filter(has_text=_DIALOG)
        self._choose_for_launch(dialog, *partitions)
        dialog.get_by_role("button", name="Launch backfill").click()
        expect(self.page.get_by_text("Created backfill")).to_be_visible()
        self.page.get_by_text("View", exact=True).last.click()
        expect(self.page).to_have_url(re.compile("/runs/b/"))

    def _choose_for_launch(self, dialog: Locator, *partitions: str) -> None:
        """Choose, again if need be: Dagster drops what was chosen before the dialog had loaded."""
        count = f"{len(partitions)} partition" + "s" * (len(partitions) > 1)
        chosen = dialog.get_by_text(count, exact=True)
        for _ in range(3):
            self.page.wait_for_timeout(SETTLING_MS)
            if chosen.is_visible():
                return
            self.choose(dialog, *partitions)
        expect(chosen).to_be_visible()

    def choose(self, dialog: Locator, *partitions: str) -> None:
        """Open the menu of partitions, click these, and close it again."""
        dialog.get_by_text("Select a partition").click()
        for partition in partitions:
            item = self.page.get_by_role("menuitem").or_(self.page.get_by_role("option"))
            item.filter(has=self.page.get_by_text(partition, exact=True)).first.click()
        dialog.get_by_text(_TITLES).first.click()

    def _go_to_launched(self) -> str:
        toast = self.page.get_by_text(re.compile("Launched run [0-9a-f]{8}"))
        expect(toast).to_be_visible()
        found = re.search("Launched run ([0-9a-f]{8})", toast.inner_text())
        assert found is not None
        self.page.get_by_text("View", exact=True).last.click()
        expect(self.page).to_have_url(re.compile(f"/runs/{found[1]}"))
        return found[1]

    def open_launchpad(self, job: str, config: str) -> None:
        """The launchpad of a job, with this text in its editor and the verdict about it below."""
        self.open(f"/locations/{LOCATION}/jobs/{job}/playground")
        editor = self.page.locator(".CodeMirror").first
        expect(editor).to_contain_text("ops:")
        editor.click()
        self.page.keyboard.press("Control+A")
        with self.page.expect_response(_validated):
            self.page.keyboard.insert_text(config)

    def launch_from_launchpad(self) -> None:
        """Launch what the launchpad shows; its run's page opens."""
        self.page.get_by_role("button", name="Launch Run").click()
        expect(self.page).to_have_url(re.compile("/runs/[0-9a-f]"))

    def _end(self) -> Locator:
        """The tag of the open run's page that says how the run ended; not those of the runs that it repeats."""
        return self.page.get_by_text(_ENDED).and_(self.page.locator("span > div > div")).first

    def await_end(self) -> str:
        """Watch the open run's page until it says how the run ended: Success, Failure or Canceled."""
        status = self._end()
        expect(status).to_be_visible(timeout=PATIENCE_MS)
        return status.inner_text()

    def await_success(self) -> None:
        """Watch the open run's page until it says Success; a failure ends the wait."""
        assert self.await_end() == "Success"

    def await_failure(self) -> str:
        """Watch the open run's page until it says Failure. Returns the one error that it shows."""
        assert self.await_end() == "Failure"
        errored = self.page.get_by_text("Errored (1)").locator("xpath=following::*[starts-with(text(), 'tiny_')][1]")
        errored.click()  # leaves only the events of this step
        expect(self.page.get_by_text(_ERROR).first).to_be_visible()
        (error,) = set(_ERROR.findall(self.page.locator("body").inner_text()))
        return str(error)

    def terminate(self) -> None:
        """Terminate the run of the open page; returns when Dagster has passed it on."""
        self.page.get_by_role("button", name="Terminate").click()
        dialog = self.page.get_by_role("dialog").filter(has_text="Terminate runs")
        dialog.get_by_role("button", name="Terminate 1 run").click()
        passed = dialog.get_by_text("Successfully requested termination")  # closes by itself when the run has ended
        expect(passed.or_(self._end()).first).to_be_visible()
        self.page.keyboard.press("Escape")


def _validated(response: Response) -> bool:
    """Whether the launchpad has received the verdict about its text."""
    return response.url.endswith("/graphql?op=PreviewConfigQuery") or "PreviewConfigQuery" in (
        response.request.post_data or ""
    )


@dataclass(frozen=True)
class Brakes:
    """Holds runs of the UI before they commit an artifact; see `braking/sitecustomize.py`."""

    folder: Path

    def hold(self, kind: str) -> None:
        """Hold the next commit of this kind."""
        (self.folder / kind).touch()

    def await_held(self, kind: str) -> None:
        """Return when a run waits to commit an artifact of this kind."""
        wait_until((self.folder / f"{kind}.reached").exists, f"a run that commits {kind}")

    def release(self) -> None:
        """Let every run go on."""
        for mark in self.folder.iterdir():
            mark.unlink()


def wait_until(reached: Callable[[], object], what: str) -> None:
    """Return when the condition holds. Fails with `what` after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.2)


def contents(lab: Laboratory) -> dict[str, str]:
    """Digests of the laboratory's artifacts, references and registry by key.

    Without the ledger, which is derived, and requests, whose end the sensor records when it likes.
    """
    store = Path(lab.store.url)
    files = [each for place in ("artifacts", "pointers") for each in (store / place).rglob("*") if each.is_file()]
    named = {each.relative_to(store).as_posix(): each for each in files}
    left_out = ("artifacts/ledger/", "pointers/targets/")
    return {key: file_sha256(each) for key, each in named.items() if not key.startswith(left_out)}


def prepare(folder: Path) -> Laboratory:
    """A folder with three experiments: tiny ran twice, refusing once (it learns nothing, says so and stops), quickstart
    never.
    """
    lab = Laboratory(folder, folder / "experiments" / "tiny.yaml", environment={"OMP_NUM_THREADS": "1"})
    lab.environment["TRIPLANE_EXPERIMENTS"] = str(lab.experiment_file.parent)
    lab.environment["BRAKES"] = str(folder / "brakes")
    lab.environment["PYTHONPATH"] = f"{BRAKING}:{ROOT}:{ROOT / 'kernels'}"
    if lab.experiment_file.exists():
        return lab
    lab.experiment_file.parent.mkdir()
    (folder / "brakes").mkdir()
    shutil.copy(ROOT / "workspace.yaml", folder)
    shutil.copy(ROOT / "experiments" / "quickstart.yaml", lab.experiment_file.parent)
    tiny = TINY.read_text()
    lab.experiment_file.write_text(tiny)
    refusing = tiny.replace("name: tiny", "name: refusing")
    refusing = refusing.replace("drop_zero_variance: false", "drop_zero_variance: true")
    refusing = refusing.replace("margin: 0.75", "margin: 0.75, on_refusal: stop")
    refusing += 'schedule: {cron: "* * * * *"}\n'
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
