"""Iterations that are sampled while others train: killed at any point, the same command finishes the same work."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import dagster as dg
import pytest

from tests.acceptance.interrupting import Job
from tests.acceptance.laboratory import Laboratory
from tests.acceptance.test_interrupts import ALL
from tests.acceptance.test_iterations_are_exact import TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SETTINGS = ("off_policy.overlap=true", "prompts.groups=16", "rollouts.group_size=8")
COMMAND = ("iterate", "-n", "3", "--json")
MADE = (*ALL, "training_start")
UNFINISHED = [dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.CANCELING]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    laboratory = Laboratory(tmp_path_factory.mktemp("undisturbed"), TINY, SETTINGS)
    laboratory.run(*COMMAND, *laboratory.settings)
    assert len(laboratory.digests("training_start")["training_start"]) == 2
    yield laboratory


@pytest.mark.parametrize(
    ("point", "number"),
    [
        ("0000 rollouts sampling", signal.SIGKILL),
        ("0000 checkpoint training", signal.SIGKILL),
        ("0001 rollouts sampling", signal.SIGTERM),
        ("0001 rollouts sampling", signal.SIGINT),
        ("0001 evaluation", signal.SIGKILL),
        ("0002 checkpoint training", signal.SIGINT),
    ],
)
def test_killed_at_any_point_the_same_command_finishes_the_same_work(
    undisturbed: Laboratory, tmp_path: Path, point: str, number: signal.Signals
) -> None:
    laboratory = Laboratory(tmp_path, TINY, SETTINGS)
    laboratory.take_base_from(undisturbed)
    running = Job(laboratory, [*COMMAND, *laboratory.settings])
    running.start()
    running.wait_until(lambda: point in running.said)
    running.signal(number)
    running.process.wait(60)
    assert [each for each in running.left_after(20) if each.startswith("process")] == []
    if number != signal.SIGKILL:
        (line,) = running.other_lines()
        assert line.startswith(f"interrupted ({number.name}): committed work is kept, continue with `triplane iterate")
    laboratory.run(*COMMAND, *laboratory.settings)
    assert laboratory.digests(*MADE) == undisturbed.digests(*MADE)
    with chdir(tmp_path), dg.DagsterInstance.from_config(".") as instance:
        assert instance.get_runs(dg.RunsFilter(statuses=UNFINISHED)) == []
