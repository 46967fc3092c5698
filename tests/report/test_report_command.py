"""`triplane report`, as a user types it."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_world import World, write_world
from typer.testing import CliRunner

from contracts.store import open_store
from ops.report.build import commit_report
from ops.report.page import read_data
from ops.report.sources import find_sources
from resources.refs import write_ref
from tests.cli.cli_history import EXPERIMENT
from triplane_dagster.cli.app import app


def run(store: str, *arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["report", "-e", EXPERIMENT, *arguments], env={"TRIPLANE_STORE": store})
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_unfinished_iteration_is_drawn_from_what_it_has(world: World, here: Path) -> None:
    code, printed, said = run(world.store.url)
    page = here / f"{EXPERIMENT}-0001.html"
    assert (code, printed.strip()) == (0, str(page))
    assert "has no report yet" in said
    data = read_data(page.read_bytes())
    assert [row["iteration"] for row in data["rows"]] == ["0000", "0001"] and data["decision"] is None


def test_the_materialized_report_is_the_one_shown(here: Path) -> None:
    store = open_store(str(here / "store"))
    write_world(store)
    made = commit_report(find_sources(store, EXPERIMENT, "0000"), [], {})
    write_ref(store, EXPERIMENT, "report", "0000", made.ref)
    code, printed, _ = run(store.url, "-i", "0000")
    assert (code, printed.strip()) == (0, str(made.path("report.html").absolute()))
    code, printed, _ = run(store.url, "-i", "0000", "--output", "out/page.html")
    assert (code, printed.strip()) == (0, str(here / "out" / "page.html"))
    assert (here / "out" / "page.html").read_bytes() == made.path("report.html").read_bytes()


def test_an_experiment_is_found_by_its_file(world: World, here: Path) -> None:
    (here / "experiments").mkdir()
    (here / "experiments" / "other-name.yaml").write_text(f"name: {EXPERIMENT}\n")
    for given in ("other-name", "experiments/other-name.yaml"):
        code, printed, said = run(world.store.url, "-e", given)
        assert (code, printed.strip()) == (0, str(here / f"{EXPERIMENT}-0001.html")), said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-i", "0042"), "iteration 0042 has no rollouts"),
        (("-e", "nobody"), "no experiment 'nobody' in "),
        (("--output", "/proc/page.html"), "/proc/page.html can't be written"),
    ],
)
def test_report_errors_are_one_line(arguments: tuple[str, ...], message: str, world: World, here: Path) -> None:
    code, _, said = run(world.store.url, *arguments)
    assert code == 1 and message in said.replace("\n", " ")
    assert list(here.iterdir()) == []
