"""`experiments`, `iterate --dry-run` and the generated reference page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_history import Run

from resources.experiment import Experiment
from triplane_dagster.cli.reference import experiment_reference, field_docstrings

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with one small experiment, named by $TRIPLANE_EXPERIMENTS."""
    folder = tmp_path / "yaml"
    folder.mkdir()
    (folder / "small.yaml").write_text(
        "name: small\ndescription: for tests\niterations: 3\ntasks: {train: 12, gate: 4, held_out: 4, unseen: 4}\n"
    )
    monkeypatch.setenv("TRIPLANE_EXPERIMENTS", str(folder))


def test_reference_of_settings_is_current() -> None:
    written = (REPOSITORY / "docs" / "experiments.md").read_text()
    assert written == experiment_reference(), "run `triplane experiments docs -o docs/experiments.md`"


def test_forks_in_the_documentation_have_names_that_are_accepted() -> None:
    pages = [
        REPOSITORY / "README.md",
        *(REPOSITORY / "docs").glob("*.md"),
        *(REPOSITORY / "triplane_dagster").glob("cli/*.py"),
    ]
    names = {name for page in pages for name in re.findall(r"triplane fork .*--as (\w+)", page.read_text())}
    assert names and [Experiment(name=name).name for name in names]


def test_every_key_of_an_experiment_has_a_description() -> None:
    texts = field_docstrings(Experiment)
    assert [name for name in Experiment.model_fields if not texts.get(name)] == []


def test_list_and_show_print_json(here: Run) -> None:
    (row,) = json.loads(here("experiments", "list", "--json").stdout)
    assert row == {"experiment": "small", "name": "small", "iterations": 3, "description": "for tests"}
    shown = json.loads(here("experiments", "show", "-e", "small", "--set", "prompts.groups=5", "--json").stdout)
    assert shown["prompts"]["groups"] == 5 and shown["tasks"]["train"] == 12


def test_an_experiment_may_be_named_by_its_file(here: Run, tmp_path: Path) -> None:
    assert (
        json.loads(here("experiments", "show", "-e", str(tmp_path / "yaml" / "small.yaml"), "--json").stdout)["name"]
        == "small"
    )


def test_a_broken_file_is_refused_by_name_and_hides_no_other(here: Run, tmp_path: Path) -> None:
    (tmp_path / "yaml" / "broken.yaml").write_text("name: [\n")
    (tmp_path / "yaml" / "other.yaml").write_text("name: renamed\n")
    listed = here("experiments", "list", "--json")
    assert [row["name"] for row in json.loads(listed.stdout)] == ["renamed", "small"]
    assert "broken.yaml is not YAML" in listed.stderr
    assert here("experiments", "show", "-e", "renamed").returncode == 0
    refused = here("experiments", "show", "-e", "broken")
    assert refused.returncode == 1 and "broken.yaml is not YAML" in refused.stderr
    assert "(broken.yaml can't be used)" in here("experiments", "show", "-e", "absent").stderr


def test_a_dry_run_names_the_running_server_and_the_backend_asked_of_it(
    here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPLANE_ENVD", "envd.test:7400")
    asked = ("iterate", "-e", "small", "--dry-run", "--set", "sandboxes.backend=gvisor", "--json")
    steps = json.loads(here("--store", str(tmp_path / "fresh"), *asked).stdout)
    assert "envd at envd.test:7400 (gvisor)" in {step["where"] for step in steps}


def test_a_dry_run_lists_every_step_and_makes_nothing(here: Run, tmp_path: Path) -> None:
    printed = here("--store", str(tmp_path / "fresh"), "iterate", "-e", "small", "--dry-run", "--json").stdout
    steps = [row["step"] for row in json.loads(printed)]
    assert steps[0] == "task_suite" and steps[-1] == "report" and "rollouts" in steps
    assert not (tmp_path / "fresh" / "artifacts").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["iterate", "-e", "nosuch", "--dry-run"], "nosuch"),
        (["iterate", "-e", "small", "--dry-run", "--set", "promts.groups=5"], "prompts"),
        (["iterate", "-e", "small", "--dry-run", "--set", "prompts.groups=many"], "prompts.groups"),
        (["iterate", "-e", "small", "--dry-run", "--set", "prompts.groups"], "prompts.groups"),
        (["tasks", "list", "-e", "small"], "triplane tasks build -e small"),
        (["tasks", "difficulty", "-e", "small"], "name one of --agent and --policy"),
        (["tasks", "difficulty", "-e", "small", "--agent", "noop", "-k", "9"], "--k 9 is above --samples 8"),
        (["tasks", "difficulty", "-e", "small", "--agent", "noop"], "triplane tasks build -e small"),
        (["iterate", "-e", "small", "--dry-run", "--set", "tasks.difficulty={low: 0.5}"], "tasks build -e small"),
        (["iterate", "-e", "small", "--set", "tasks.difficulty={low: 0.5}"], "tasks build -e small"),
    ],
)
def test_a_wrong_name_or_value_is_one_line_that_says_the_fix(here: Run, arguments: list[str], named: str) -> None:
    done = here(*arguments)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert named in done.stderr


def test_an_experiment_may_be_named_as_its_file_or_as_it_names_itself(here: Run, tmp_path: Path) -> None:
    (tmp_path / "yaml" / "large-model.yaml").write_text("name: large_model\n")
    for name in ("large-model", "large_model"):
        assert json.loads(here("experiments", "show", "-e", name, "--json").stdout)["name"] == "large_model"
