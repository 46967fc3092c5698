"""SIGTERM and Ctrl-C while any asset is made: `iterate` ends within seconds, leaves nothing, and the same command
finishes the same work.
"""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from tests.acceptance.interrupting import Job, last_run
from tests.acceptance.laboratory import Laboratory
from tests.acceptance.test_iterations_are_exact import KINDS, TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
WITHIN_S = 10.0
COMMAND = ("iterate", "-n", "1", "--json")
LONGER = (
    "base.sft.max_steps=150",
    "base.sft.snapshot_every=10",
    "base.sft.evaluate_every=50",
    "prompts.groups=16",
    "rollouts.group_size=8",
    "evaluation.gate_samples=16",
    "evaluation.held_out_samples=16",
)
"""So that there is time to hit what is quick otherwise."""
INT, TERM = signal.SIGINT, signal.SIGTERM
POINTS = [
    ("base_policy", "pause:tokenizer", INT),
    ("base_policy", "pause:demonstrations", TERM),
    ("base_policy", "base_policy training", INT),
    ("base_policy", "base_policy training", TERM),
    ("base_policy", "pause:trainer_snapshot", INT),
    ("task_suite", "task_suite validating", INT),
    ("task_suite", "task_suite validating", TERM),
    ("iteration_inputs", "pause:iteration_inputs", INT),
    ("iteration_inputs", "pause:iteration_inputs", TERM),
    ("prompts", "pause:prompts", INT),
    ("prompts", "pause:prompts", TERM),
    ("rollouts", "rollouts sampling", INT),
    ("rollouts", "rollouts sampling", TERM),
    ("rollouts", "pause:rollouts", TERM),
    ("rewards", "pause:rewards", INT),
    ("rewards", "pause:rewards", TERM),
    ("dataset", "pause:dataset", INT),
    ("dataset", "pause:dataset", TERM),
    ("checkpoint", "pause:trainer_state", INT),
    ("checkpoint", "pause:checkpoint", TERM),
    ("evaluation", "evaluation gate", INT),
    ("evaluation", "pause:evaluation", TERM),
    ("sampler", "pause:sampler", INT),
    ("sampler", "pause:sampler", TERM),
    ("report", "pause:report", INT),
    ("report", "pause:report", TERM),
]
"""(asset, what shows that it is being made: a line of progress or the commit of a kind of artifact, signal), in the
order of the work.
"""
ALL = (*KINDS, "group", "sampler", "report")


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    """The one laboratory that all interruptions hit, each on what those before it left."""
    laboratory = Laboratory(tmp_path_factory.mktemp("interrupted"), TINY, LONGER)
    yield laboratory


def job(laboratory: Laboratory, pause_at: str = "") -> Job:
    return Job(laboratory, [*COMMAND, *laboratory.settings], pause_at)


def finish(laboratory: Laboratory) -> None:
    """Run what is left of the one iteration; nothing when it is whole, since the same command would then begin the
    next.
    """
    if not laboratory.digests("report")["report"]:
        laboratory.run(*COMMAND, *laboratory.settings)


def slack() -> float:
    """How much slower than a quiet machine this one is now."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(("asset", "point", "number"), POINTS, ids=lambda value: str(getattr(value, "name", value)))
def test_a_signal_ends_it_within_seconds_and_leaves_nothing(
    interrupted: Laboratory, asset: str, point: str, number: signal.Signals
) -> None:
    pause_at = point.removeprefix("pause:") if point.startswith("pause:") else ""
    running = job(interrupted, pause_at)
    running.start()
    running.wait_until(running.paused.exists if pause_at else lambda: point in running.said)
    taken = running.seconds_to_end(running.signal(number))
    left = running.left_after(0.5 * slack())
    print(f"{asset} ({point}) {number.name}: ended after {taken:.2f} s, load {os.getloadavg()[0]:.1f}")

    assert running.process.returncode == 128 + number
    (line,) = running.other_lines()
    assert line.startswith(
        f"interrupted ({number.name}): committed work is kept, continue with `triplane iterate -n 1 --json"
    )
    assert left == []
    assert taken < WITHIN_S * slack()
    status, failed = last_run(interrupted)
    assert status is dg.DagsterRunStatus.CANCELED
    assert [step.split("__")[-1].partition(".")[0] for step in failed] == [asset]


def test_the_interrupted_work_is_finished_by_the_same_command_and_equals_undisturbed_work(
    interrupted: Laboratory, tmp_path: Path
) -> None:
    finish(interrupted)
    undisturbed = Laboratory(tmp_path, TINY, LONGER)
    undisturbed.run(*COMMAND, *undisturbed.settings)
    assert interrupted.digests(*ALL) == undisturbed.digests(*ALL)
    assert len(undisturbed.digests("report")["report"]) == 1


def test_what_hangs_does_not_hold_it_up_and_a_second_signal_ends_it_at_once(
    interrupted: Laboratory, tmp_path: Path
) -> None:
    """A group's commit runs in a thread that nothing can interrupt: only ending the process helps."""
    finish(interrupted)
    laboratory = Laboratory(tmp_path, TINY, LONGER)
    laboratory.take_base_from(interrupted)
    for again, within in ((False, WITHIN_S), (True, 3.0)):
        running = job(laboratory, "group")
        running.start()
        running.wait_until(running.paused.exists)
        sent = running.signal(INT)
        if again:
            time.sleep(1)
            sent = running.signal(INT)
        taken = running.seconds_to_end(sent)
        print(f"hanging, {'second' if again else 'one'} signal: ended after {taken:.2f} s")
        assert running.process.returncode == 128 + INT
        (line,) = running.other_lines()
        assert line.startswith("interrupted (SIGINT): committed work is kept")
        assert taken < within * slack()
        left = [each for each in running.left_after(20) if "/tmp/stage-" not in each]
        assert left == [], "children end with their parent"
    laboratory.run(*COMMAND, *laboratory.settings)
    assert laboratory.digests("group", "rollouts") == interrupted.digests("group", "rollouts")


def test_control_c_on_a_terminal_ends_with_the_line_that_says_how_to_go_on(tmp_path: Path) -> None:
    laboratory = Laboratory(tmp_path, TINY, ("base.sft.max_steps=4000",))
    running = job(laboratory)
    terminal, its_end = pty.openpty()
    command = ["setsid", "--ctty", "--wait", *laboratory.command(*running.arguments)]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=running.environment | {"TERM": "xterm", "COLUMNS": "150"},
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
    )
    os.close(its_end)
    shown = read_until(terminal, b"loss")
    os.write(terminal, b"\x03")
    shown += read_until(terminal, None)
    os.close(terminal)
    assert process.wait(60) == 128 + INT
    assert b"Traceback" not in shown
    last = shown.decode().strip().splitlines()[-1]
    assert last.startswith("interrupted (SIGINT): committed work is kept, continue with `triplane iterate")
    assert running.left_after(0.5 * slack()) == []


def read_until(terminal: int, wanted: bytes | None) -> bytes:
    """What a terminal shows up to `wanted`, or until nobody has it open any more."""
    shown = b""
    while wanted is None or wanted not in shown:
        try:
            shown += os.read(terminal, 65536)
        except OSError:
            break
    return shown
