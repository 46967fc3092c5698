import sys
import time
from pathlib import Path

import pytest

from contracts.store import open_store
from resources.errors import LaunchFailed, LaunchKilled
from resources.experiment import parse_experiment
from resources.launcher import LocalLauncher
from tests.dagster.launching import Arrived, launch_in_an_op
from trainer.errors import RANKS_LOST_STATUS
from trainer.lifetime import PARENT_VARIABLE
from triplane_dagster.dry_run import plan_of

TALK = """
import time
from dagster_pipes import open_dagster_pipes
with open_dagster_pipes() as pipes:
    for step in range(3):
        pipes.report_custom_message({"metrics": {"step": step}})
        time.sleep(0.3)
"""


def launch(code: str, *, nodes: int = 1, gpus: int = 0, timeout_s: float = 60.0) -> Arrived:
    """Run Python code through the launcher inside an op; each message with when it arrived."""
    arrived: Arrived = []
    command = [sys.executable, "-c", code]
    launch_in_an_op(LocalLauncher(grace_s=5), command, arrived, nodes=nodes, gpus=gpus, timeout_s=timeout_s)
    return arrived


def test_messages_arrive_while_the_process_runs() -> None:
    arrived = launch(TALK)
    assert [message["metrics"]["step"] for _, message in arrived] == [0, 1, 2]
    assert arrived[-1][0] - arrived[0][0] > 0.2


def test_a_failing_process_is_quoted() -> None:
    with pytest.raises(LaunchFailed, match=r"ended with code 2: .*no room on the disk") as found:
        launch("import sys; print('no room on the disk', file=sys.stderr); sys.exit(2)")
    assert not isinstance(found.value, LaunchKilled)


def test_a_killed_process_is_told_from_one_that_failed() -> None:
    with pytest.raises(LaunchKilled, match=r"was killed \(SIGKILL\): half way"):
        launch("import os; print('half way', flush=True); os.kill(os.getpid(), 9)")


@pytest.mark.parametrize("status", [RANKS_LOST_STATUS, 137, 143])
def test_a_job_whose_rank_was_killed_or_hung_may_be_launched_again(status: int) -> None:
    with pytest.raises(LaunchKilled, match=rf"was killed or lost a rank \(code {status}\): half way"):
        launch(f"import sys; print('half way', flush=True); sys.exit({status})")


def test_a_process_that_takes_too_long_is_stopped() -> None:
    started = time.monotonic()
    with pytest.raises(LaunchFailed, match=r"took longer than 1 s: raise trainer\.launcher\.timeout_s"):
        launch("import time; time.sleep(600)", timeout_s=1)
    assert time.monotonic() - started < 30


def test_launched_process_knows_its_parent() -> None:
    launch(f"import os, sys; sys.exit(os.environ['{PARENT_VARIABLE}'] != str(os.getppid()))")


def test_local_launcher_refuses_several_nodes() -> None:
    with pytest.raises(LaunchFailed, match="set it to 1"):
        launch("pass", nodes=2)


@pytest.mark.slow
def test_local_launcher_refuses_gpus_and_dry_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match=r"gpus=8: this machine has 0 NVIDIA.*set it to 0"):
        launch("pass", gpus=8)
    for gpus, refused in ((0, False), (8, True)):
        experiment = parse_experiment({"name": "one", "trainer": {"launcher": {"gpus": gpus}}})
        (row,) = (row for row in plan_of(experiment, open_store(str(tmp_path))) if row.step == "checkpoint")
        assert ("WILL BE REFUSED" in row.where) == refused
