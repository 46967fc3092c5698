"""`status`, `episodes` and the command tree itself, as a user types them."""

from __future__ import annotations

import json
import locale
import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pytest
from cli_history import EXPERIMENT, History, Run, write_history
from hypothesis import given
from hypothesis import strategies as st

from contracts.artifacts import Artifact, ArtifactWriter
from contracts.episodes import EPISODES
from contracts.errors import ConfigError
from contracts.store import open_store
from curation.mixture.accepted import MEMBERS
from resources.refs import note, write_ref
from tests.report.report_world import commit, write_world
from triplane_dagster import cli
from triplane_dagster.cli.history import json_of, summary
from triplane_dagster.cli.output import cell, write_page
from triplane_dagster.cli.serve import asked_policy
from triplane_dagster.episode_index import rewards_of


def test_help_teaches_with_examples(here: Run) -> None:
    assert "triplane demo" in here("--help").stdout
    for command in (
        ["lineage"],
        ["status"],
        ["episodes", "list"],
        ["episodes", "show"],
        ["episodes", "export"],
        ["serve"],
        ["ui"],
        ["iterate"],
        ["demo"],
    ):
        done = here(*command, "--help")
        assert done.returncode == 0, done.stderr
        assert f"triplane {' '.join(command)}" in done.stdout.replace("Usage: triplane", "", 1)


def test_status_shows_the_live_policy_and_each_iteration(triplane: Run, history: History) -> None:
    printed = triplane("status").stdout
    assert EXPERIMENT in printed
    assert f"live: {history.digest('next')[:12]}" in printed
    assert "0000" in printed


def test_status_in_json_has_whole_digests_and_rewards(here: Run, history: History) -> None:
    (found,) = json.loads(here("status", "-e", EXPERIMENT, "--json").stdout)
    assert found["live"]["policy"]["digest"] == history.digest("next")
    (iteration,) = found["iterations"]
    assert iteration["policy"] == history.digest("next") and iteration["parent"] == history.digest("base")
    assert iteration["train_reward"] == pytest.approx((1.1 + 0.1 * 3) / 4)


def test_status_of_an_empty_store_says_how_to_begin(here: Run) -> None:
    assert "triplane demo" in here("--store", "empty", "status").stdout
    assert json.loads(here("--store", "empty", "status", "--json").stdout) == []


@pytest.mark.parametrize("given", [EXPERIMENT, "other-name", "experiments/other-name.yaml"])
def test_an_experiment_is_named_by_itself_or_by_its_file(
    given: str, here: Run, history: History, tmp_path: Path
) -> None:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "other-name.yaml").write_text(f"name: {EXPERIMENT}\n")
    (found,) = json.loads(here("status", "-e", given, "--json").stdout)
    assert (found["experiment"], found["live"]["policy"]["digest"]) == (EXPERIMENT, history.digest("next"))
    assert len(json.loads(here("episodes", "list", "-e", given, "--json").stdout)) == 4
    assert asked_policy(history.store, given, "live").ref == history.artifacts["next"].ref


def test_status_compares_with_the_policy_that_training_started_from(tmp_path: Path) -> None:
    """With overlap, an older one sampled."""
    store = open_store(str(tmp_path))
    world = write_world(store)
    base, acting, suite = (world.history.artifacts[name].ref for name in ("base", "next", "suite"))
    inputs = commit(store, "iteration_inputs", {"policy": acting, "task_suite": suite}, {"inputs.json": {}})
    write_ref(store, EXPERIMENT, "iteration_inputs", "0000", inputs.ref)
    found = json_of(summary(store, EXPERIMENT, "0000", {}))
    assert found["parent"] == base.digest
    assert found["pass_rates"]["gate"]["parent"]["rate"] == 0.25
    assert found["measures"]["held_out"]["parent"]["sampled"]["rate"] == 0.25


def test_episodes_show_the_current_grading_of_an_iteration_else_the_latest(tmp_path: Path) -> None:
    history = write_history(open_store(str(tmp_path)))
    store, rollouts, first = history.store, history.artifacts["rollouts"], history.artifacts["rewards"]
    table = first.table("rewards.parquet")
    place = table.schema.get_field_index("reward")

    def grade(reward: float) -> Artifact:
        rewards = pa.array([reward] * table.num_rows, table.schema.field(place).type)
        graded = table.set_column(place, table.schema.field(place), rewards)
        parents = {"rollouts": rollouts.ref}
        return commit(
            store, "rewards", parents, {}, lambda out: out.add_table("rewards.parquet", graded), {"all": reward}
        )

    gradings = [grade(reward) for reward in (0.25, 0.5, 0.75)]

    def shown(iteration: tuple[str, str] | None) -> set[float]:
        return {row["reward"] for row in rewards_of(store, rollouts, iteration).values()}

    assert shown(("other", "0000")) == {0.75}
    assert shown(None) == shown((EXPERIMENT, "0000")) == set(table["reward"].to_pylist())
    write_ref(store, EXPERIMENT, "rewards", "0000", gradings[1].ref)
    assert shown((EXPERIMENT, "0000")) == {0.5}


def test_episodes_list_shows_rewards_and_can_filter(here: Run, history: History) -> None:
    rows = json.loads(here("episodes", "list", "-e", EXPERIMENT, "--json").stdout)
    assert len(rows) == 4
    assert {row["episode"]: row["solved"] for row in rows}[history.solved.episode_id] is True
    solved = json.loads(here("episodes", "list", "-e", EXPERIMENT, "--solved", "--json").stdout)
    assert [row["episode"] for row in solved] == [history.solved.episode_id]
    assert history.solved.episode_id in here("episodes", "list", "-e", EXPERIMENT).stdout


def test_episodes_show_prints_roles_calls_diff_and_verdict(here: Run, history: History) -> None:
    printed = here("episodes", "show", history.solved.episode_id[:10]).stdout
    for expected in (
        "task",
        "policy",
        "environment",
        "add returns the sum",
        "<tool_call>",
        "+    return a + b",
        "verdict solved",
    ):
        assert expected in printed
    assert "kept it" in printed


def test_episodes_are_exported_as_json_lines(here: Run, history: History, tmp_path: Path) -> None:
    lines = here("episodes", "export", "-e", EXPERIMENT).stdout.splitlines()
    rows = {row["episode"]: row for row in map(json.loads, lines)}
    listed = json.loads(here("episodes", "list", "-e", EXPERIMENT, "--json").stdout)
    assert list(rows) == [row["episode"] for row in listed]
    solved = rows[history.solved.episode_id]
    shown = json.loads(here("episodes", "show", history.solved.episode_id, "--json").stdout)
    assert solved["messages"] == shown["messages"] and solved["reward"] == shown["reward"]
    assert "sequences" not in solved and {row["kept"] for row in rows.values()} <= {True, False, None}
    file = tmp_path / "episodes.jsonl"
    said = here("episodes", "export", "-e", EXPERIMENT, "--tokens", "--kept", "-o", str(file)).stdout
    kept = list(map(json.loads, file.read_text().splitlines()))
    assert said.startswith(f"{len(kept)} episodes of rollouts") and all(row["kept"] for row in kept)
    for row in kept:
        assert sum(len(each["token_ids"]) for each in row["sequences"]) == row["tokens"]
    rollouts = ("--artifact", history.artifacts["rollouts"].ref.digest)
    assert [json.loads(line) for line in here("episodes", "export", *rollouts).stdout.splitlines()] == [*rows.values()]
    assert len(here("episodes", "export", *rollouts, "--kept").stdout.splitlines()) == len(kept)
    for wrong, why in ((tmp_path / "absent" / "x", "can't be written"), (tmp_path, "is a folder")):
        refused = here("episodes", "export", "-e", EXPERIMENT, "-o", str(wrong))
        assert refused.returncode == 1 and why in refused.stderr and list(tmp_path.glob("**/*.part")) == []


def test_a_page_that_does_not_fit_leaves_the_earlier_one(tmp_path: Path) -> None:
    page, limits = tmp_path / "page.html", resource.getrlimit(resource.RLIMIT_FSIZE)
    page.write_bytes(b"earlier")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"page\.html can't be written"):
            write_page(page, bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("page.html", b"earlier")]


def test_an_export_goes_where_a_link_or_pipe_leads(here: Run, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real.jsonl")
    here("episodes", "export", "-e", EXPERIMENT, "-o", str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor() as beside:
        read = beside.submit((tmp_path / "pipe").read_text)
        assert here("episodes", "export", "-e", EXPERIMENT, "-o", str(tmp_path / "pipe")).returncode == 0
        assert read.result(30) == (tmp_path / "real.jsonl").read_text()


def test_episodes_show_in_json_contains_the_recorded_tokens(here: Run, history: History) -> None:
    found = json.loads(here("episodes", "show", history.failed.episode_id, "--json").stdout)
    assert [message["role"] for message in found["messages"][0]] == ["task", "policy", "environment", "policy"]
    assert sum(message["tokens"] for message in found["messages"][0]) == found["tokens"]
    assert found["reward"]["solved"] is False
    assert found["datasets"][0]["reason"] == "zero_variance"
    assert found["telemetry"]["seconds"] == 1.5


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["episodes", "show", "feedbeef"], "feedbeef"),
        (["episodes", "list", "-e", "nosuch"], "nosuch"),
        (["episodes", "list", "-e", EXPERIMENT, "-i", "0042"], "0042"),
        (["serve", "-e", EXPERIMENT, "--policy", "feedbeef"], "feedbeef"),
        (["serve", "-e", "nosuch"], "no experiment 'nosuch'"),
        (["status", "-e", "nosuch"], f"has {EXPERIMENT}"),
        (["experiments", "show", "-e", "nosuch"], "nosuch"),
        (["--store", "gs://bucket", "status"], "gs"),
        (["experiments", "show", "-e", "x" * 300], "File name too long: shorten it"),
        (["episodes", "show", os.fsdecode(b"\xff")], r"'\udcff' is not UTF-8"),
        (["recall", "--task", os.fsdecode(b"\xff")], r"--task '\udcff' is not UTF-8"),
        (["quarantine", "--reward-rule", os.fsdecode(b"\xff")], r"--reward-rule '\udcff' is not UTF-8"),
    ],
)
def test_every_error_is_one_line_that_names_the_thing(here: Run, arguments: list[str], named: str) -> None:
    done = here(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert named in done.stderr


def test_a_working_directory_that_was_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(SystemExit, match="the working directory was removed: change to one that exists"):
        cli.main()


def test_an_interrupt_before_the_command_is_known_says_so() -> None:
    program = (
        "import os, signal, sys; from triplane_dagster import cli; sys.meta_path.insert(0, type('Finder', (),"
        " {'find_spec': lambda *_: os.kill(os.getpid(), signal.SIGINT)})()); cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "\ninterrupted (SIGINT): nothing was begun\n")


def test_a_wrong_option_exits_2(here: Run) -> None:
    for wrong in (
        ["status", "--nosuch"],
        ["metrics", "dump", "--seconds", "inf"],
        ["fleet", "drain", "http://a:80", "--deadline", "inf"],
        ["fleet", "update", "--deadline", "1e308"],
    ):
        assert here(*wrong).returncode == 2


def test_recall_reads_a_store_whose_files_of_chats_have_the_task_of_a_rollout_and_a_bad_id(
    here: Run, tmp_path: Path
) -> None:
    store = open_store(str(tmp_path / "store"))
    history = write_history(store)
    rows = [{"episode_id": name, "task_id": "add-0001", "tool_calls": [{"name": "edit"}]} for name in ("1" * 32, "x-7")]
    members = [{"episode_id": row["episode_id"], "kept": True} for row in rows]
    with ArtifactWriter(store, "chats", "1" * 64, parents={}, config={}, code_version="1") as out:
        out.add_table("episodes.parquet", pa.Table.from_pylist(rows, schema=EPISODES))
        out.add_table("members.parquet", pa.Table.from_pylist(members, schema=MEMBERS))
        note(store, out.commit().ref)
    for command in (["store", "reindex"], ["recall", "--task", "add-0001"], ["recall", "--tool", "edit"]):
        done = here("--store", store.url, *command)
        assert done.returncode == 0, done.stderr
    assert "5 episodes with the tool edit" in done.stdout and history.digest("base")[:12] in done.stdout
    assert here("--store", store.url, "recall", "--episode", "1" * 32).returncode == 0


@given(st.text())
def test_control_characters_of_a_policy_are_escaped(text: str) -> None:
    shown = cell({"diff": [text, text]}).replace("\r\n", "\n")
    assert all(letter.isprintable() or letter in "\t\n" or ord(letter) > 0x9F for letter in shown)


def test_a_locale_that_is_not_utf8_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[list[str]] = []

    def execv(program: str, arguments: list[str]) -> NoReturn:
        begun.append([program, *arguments])
        raise SystemExit(0)

    monkeypatch.setattr(locale, "getpreferredencoding", lambda do_setlocale=True: "ISO-8859-9")
    monkeypatch.setenv("PYTHONUTF8", "0")
    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(SystemExit):
        cli.main()
    assert os.environ["PYTHONUTF8"] == "1"
    assert begun == [[sys.executable, sys.executable, *sys.orig_argv[1:]]]


@pytest.mark.parametrize("command", ["status", "experiments list"])
def test_read_commands_do_not_import_dagster(history: History, command: str) -> None:
    program = (
        f"import sys; sys.argv = ['triplane', *{command.split()}]\nfrom triplane_dagster.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\nassert 'dagster' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRIPLANE_STORE": history.store.url},
        check=True,
        timeout=120,
    )
