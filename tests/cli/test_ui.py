"""`triplane ui` refuses early what would fail late or do harm."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from contracts.addresses import require_free
from contracts.errors import ConfigError
from contracts.processes import start_of
from inference.server.listening import split_address
from ops.report import ROUTE
from tests.webserver import wait_until_up
from triplane_dagster.cli.ui import alone, keep_running


def test_a_taken_port_is_named_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} \(Address already in use\): choose another"):
            require_free("127.0.0.1", port, "--port")
        with pytest.raises(
            ConfigError, match=rf"127\.0\.0\.1:{port} \(Address already in use\): choose another --listen"
        ):
            split_address(f"127.0.0.1:{port}")
    require_free("127.0.0.1", port, "--port")


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid:3000 \(Name or service not known\)"):
        require_free("no-such-host.invalid", 3000, "--host")


def test_no_host_is_not_every_interface() -> None:
    with pytest.raises(ConfigError, match=r"no host\): give --host one"):
        require_free("", 3000, "--host")


def test_a_daemon_that_ends_is_started_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It lists its processes in a file, and is killed once."""
    pids, over = tmp_path / "pids", threading.Event()
    command = ["sh", "-c", f"echo $$ >>{pids}; exec sleep 600"]
    keeper = threading.Thread(target=keep_running, args=(command, over))
    keeper.start()
    try:
        os.kill(await_lines(pids, 1)[0], signal.SIGKILL)
        second = await_lines(pids, 2)[1]
        assert "daemon ended with code -9; starting it again" in capsys.readouterr().err
    finally:
        over.set()
        keeper.join()
    assert start_of(second) is None, "it ends with the UI"


def test_a_daemon_is_started_again_after_a_fault_and_after_the_clock_was_set_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait until the clock is where it was."""
    pids, over, ahead, starts = tmp_path / "pids", threading.Event(), [86400.0], iter([OSError("disk full"), None])
    real = time.time
    monkeypatch.setattr("triplane_dagster.cli.ui.time.time", lambda: real() + ahead[0])
    monkeypatch.setattr("triplane_dagster.cli.ui.backoff_s", lambda failures, first_s, longest_s: 0.01)

    def before() -> None:
        if (fault := next(starts, None)) is not None:
            raise fault

    command = ["sh", "-c", f"echo $$ >>{pids}; exec sleep 600"]
    keeper = threading.Thread(target=keep_running, args=(command, over, before))
    keeper.start()
    try:
        (first,) = await_lines(pids, 1)
        assert "daemon could not be started (disk full); starting it again" in capsys.readouterr().err
        ahead[0] = 0.0
        await_lines(pids, 2)
        assert "was stopped, since the clock was set back by 86400 s" in capsys.readouterr().err
        assert start_of(first) is None
    finally:
        over.set()
        keeper.join()


def await_lines(path: Path, count: int) -> list[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and len(lines := path.read_text().split()) >= count:
            return [int(line) for line in lines]
        time.sleep(0.05)
    raise AssertionError(f"{path} has no {count} lines")


def test_one_instance_has_one_ui(tmp_path: Path) -> None:
    with alone(tmp_path / "home"):
        with pytest.raises(ConfigError, match=r"already running for .*home"), alone(tmp_path / "home"):
            raise AssertionError("two at once")
    with alone(tmp_path / "home"):
        pass


@pytest.mark.slow
def test_records_and_a_relative_store_are_those_of_the_working_directory(tmp_path: Path) -> None:
    """As for every other command, also in a folder without workspace.yaml and dagster.yaml."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = {name: value for name, value in os.environ.items() if name != "DAGSTER_HOME"} | {"TRIPLANE_STORE": "mine"}
    command = [sys.executable, "-c", "from triplane_dagster.cli import main; main()", "ui", "--port", str(port)]
    log = tmp_path / "ui.log"
    with log.open("wb") as sink:
        child = subprocess.Popen(command, cwd=tmp_path, env=place, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL)
    try:
        wait_until_up(f"http://127.0.0.1:{port}", child, log, 240)
        answer = httpx.get(f"http://127.0.0.1:{port}{ROUTE}/{'0' * 64}")
        assert f"in {tmp_path / 'mine'}: " in answer.text
    finally:
        child.terminate()
        child.wait(60)
    assert (tmp_path / ".triplane" / "dagster" / "storage").is_dir() and (tmp_path / ".triplane-ui.lock").is_file()
