"""`status`, `episodes` and the command tree itself, as a user types them."""

from __future__ import annotations

import json
import locale
import os
import subprocess
import sys
from typing import NoReturn

import pytest
from cli_history import EXPERIMENT, History, Run
from hypothesis import given
from hypothesis import strategies as st

from triplane_dagster import cli
from triplane_dagster.cli.output import cell


def test_help_teaches_with_examples(here: Run) -> None:
    assert "triplane demo" in here("--help").stdout
    for command in (
        ["lineage"],
        ["status"],
        ["episodes", "list"],
        ["episodes", "show"],
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
        (["experiments", "show", "-e", "nosuch"], "nosuch"),
        (["--store", "gs://bucket", "status"], "gs"),
    ],
)
def test_every_error_is_one_line_that_names_the_thing(here: Run, arguments: list[str], named: str) -> None:
    done = here(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert named in done.stderr


def test_a_wrong_option_exits_2(here: Run) -> None:
    assert here("status", "--nosuch").returncode == 2


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


def test_read_commands_do_not_import_dagster(history: History) -> None:
    program = (
        "import sys; sys.argv = ['triplane', 'status']\nfrom triplane_dagster.cli import main\ntry: main()\nexcept"
        " SystemExit as end: assert not end.code\nassert 'dagster' not in sys.modules"
    )
    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TRIPLANE_STORE": history.store.url},
        check=True,
        timeout=120,
    )
