"""`triplane rollback` as an operator types it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli_history import EXPERIMENT, History, Run, write_history
from typer.testing import CliRunner

from contracts.store import open_store
from resources.registry import Registry
from triplane_dagster.cli.app import app
from triplane_dagster.run import open_instance


@pytest.fixture
def mine(tmp_path: Path) -> History:
    """A history of its own: these tests change it."""
    return write_history(open_store(str(tmp_path / "store")))


@pytest.fixture
def triplane(mine: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / f"{EXPERIMENT}.yaml").write_text(f"name: {EXPERIMENT}\n")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    monkeypatch.chdir(tmp_path)
    place = {
        "TRIPLANE_STORE": mine.store.url,
        "TRIPLANE_EXPERIMENTS": str(tmp_path / "experiments"),
        "COLUMNS": "200",
        "DAGSTER_HOME": str(tmp_path / "home"),
        "TRIPLANE_DEBUG": "",
    }
    for name, value in place.items():
        monkeypatch.setenv(name, value)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        done = CliRunner().invoke(app, arguments)
        return subprocess.CompletedProcess(list(arguments), done.exit_code, done.stdout, done.stderr)

    return run


def test_a_rollback_shows_what_changes_and_does_it(triplane: Run, mine: History) -> None:
    done = triplane("rollback", "-e", EXPERIMENT, "--reason", "it cheats", "--yes")
    assert done.returncode == 0, done.stderr
    assert f"from  {mine.digest('next')[:12]}  made by iteration 0000" in done.stdout
    assert f"to    {mine.digest('base')[:12]}  the base policy" in done.stdout
    assert "will not count any more: what iterations 0000 learned" in done.stdout
    live = Registry(mine.store, EXPERIMENT).live()
    assert live is not None and live.policy.digest == mine.digest("base")
    assert live.trainer_state.digest == mine.digest("base_state")
    status = triplane("status", "-e", EXPERIMENT)
    assert (
        f"live: {mine.digest('base')[:12]}, the base policy (change 2 of the registry, by a rollback (it cheats))"
        in status.stdout
    )
    (found,) = json.loads(triplane("status", "-e", EXPERIMENT, "--json").stdout)
    assert found["live"]["rollback"]["reason"] == "it cheats" and found["live"]["iteration"] == "base"
    listed = json.loads(triplane("rollback", "-e", EXPERIMENT, "--list", "--json").stdout)
    assert [(row["what"], row["state"]) for row in listed] == [("promotion", "undone"), ("rollback to base", "live")]
    again = triplane("rollback", "-e", EXPERIMENT, "--to", mine.digest("next")[:8], "--yes", "--json")
    assert json.loads(again.stdout)["live"]["policy"]["digest"] == mine.digest("next")


def test_dagsters_pages_show_a_rollback_by_command(triplane: Run) -> None:
    import dagster as dg

    assert triplane("rollback", "-e", EXPERIMENT, "--reason", "it cheats", "--yes").returncode == 0
    with open_instance() as instance:
        (record,) = instance.fetch_observations(dg.AssetKey([EXPERIMENT, "sampler"]), limit=5).records
    assert record.asset_observation is not None
    assert record.asset_observation.metadata["reason"].value == "it cheats"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--to", "9", "--yes"], "matches no single policy that was live"),
        (["--to", "feedbeef", "--yes"], "'feedbeef'"),
        (["--yes", "--reason", " "], "the reason of the rollback is empty"),
        ([], "add --yes"),
    ],
)
def test_impossible_rollback_fails_with_one_line_and_changes_nothing(
    arguments: list[str], named: str, triplane: Run, mine: History
) -> None:
    done = triplane("rollback", "-e", EXPERIMENT, *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and named in done.stderr
    assert len(Registry(mine.store, EXPERIMENT).history()) == 1


def test_a_target_whose_files_are_damaged_is_refused_before_anything_changes(triplane: Run, mine: History) -> None:
    config = mine.artifacts["base"].path("config.json")
    config.chmod(0o644)
    config.write_bytes(b"{}")
    done = triplane("rollback", "-e", EXPERIMENT, "--yes")
    assert done.returncode == 1 and "does not match its manifest" in done.stderr
    assert len(Registry(mine.store, EXPERIMENT).history()) == 1


def test_follow_and_policy_options_are_exclusive(triplane: Run) -> None:
    done = triplane("serve", "-e", EXPERIMENT, "--follow", "--policy", "base")
    assert done.returncode == 1 and "use one of the two options" in done.stderr


def name_server(tmp_path: Path, url: str) -> None:
    text = f"name: {EXPERIMENT}\ndeployment:\n  servers: [{url}]\n  attempts: 1\n"
    (tmp_path / "experiments" / f"{EXPERIMENT}.yaml").write_text(text)


@contextmanager
def silent_server() -> Iterator[tuple[str, socket.socket]]:
    """A server that takes a connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1", listening


def test_rollback_to_the_live_policy_updates_servers_only(triplane: Run, mine: History, tmp_path: Path) -> None:
    done = triplane("rollback", "-e", EXPERIMENT, "--to", "1")
    assert done.returncode == 0, done.stderr
    assert "is already live" in done.stdout and "servers: none are named" in done.stdout
    with silent_server() as (url, _):
        name_server(tmp_path, url)
    done = triplane("rollback", "-e", EXPERIMENT, "--to", mine.digest("next")[:9])
    assert done.returncode == 0 and "0 of 1 serve the live policy" in done.stdout and url in done.stderr
    found = json.loads(triplane("rollback", "-e", EXPERIMENT, "--to", "1", "--json").stdout)
    assert found["live"]["number"] == 1 and found["servers"][0]["url"] == url
    assert len(Registry(mine.store, EXPERIMENT).history()) == 1


def test_interrupt_during_the_change_does_not_advise_another_rollback(triplane: Run, mine: History) -> None:
    code = (
        "import signal, sys, ops.rollback\n"
        "from triplane_dagster.cli import main\n"
        "ops.rollback.failpoint = lambda name: signal.raise_signal(signal.SIGINT)\n"
        f"sys.argv = ['triplane', 'rollback', '-e', {EXPERIMENT!r}, '--yes']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert len(Registry(mine.store, EXPERIMENT).history()) == 2
    assert done.returncode == 128 + signal.SIGINT
    assert f"`triplane rollback -e {EXPERIMENT} --list` shows whether it was rolled back" in done.stderr
    assert "continue with" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_swap_reports_the_rollback_and_how_to_update_servers(
    number: signal.Signals, triplane: Run, mine: History, tmp_path: Path
) -> None:
    with silent_server() as (url, listening):
        name_server(tmp_path, url)
        command = [sys.executable, "-m", "triplane_dagster.cli", "rollback", "-e", EXPERIMENT, "--yes"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            listening.settimeout(120)
            with listening.accept()[0]:
                process.send_signal(number)
                _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    (line,) = said.strip().splitlines()
    base = mine.digest("base")[:12]
    assert line.startswith(f"interrupted: rolled back, {base} is live; not all servers were updated")
    assert f"`triplane rollback -e {EXPERIMENT} --to base`" in line
    again = triplane("rollback", "-e", EXPERIMENT, "--to", "base")
    assert again.returncode == 0 and "is already live" in again.stdout
    assert len(Registry(mine.store, EXPERIMENT).history()) == 2, "what it says to do goes no policy further back"
