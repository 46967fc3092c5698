"""Iterations repeat exactly, survive kills, never promote backwards, and are traceable both ways."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contracts.artifacts import list_artifacts
from resources.registry import Registry
from tests.acceptance.laboratory import ROOT, Laboratory, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
TINY = ROOT / "tests" / "dagster" / "tiny.yaml"
KINDS = (
    "task_suite",
    "tokenizer",
    "demonstrations",
    "prompts",
    "rollouts",
    "rewards",
    "dataset",
    "checkpoint",
    "trainer_state",
    "evaluation",
)
ITERATIONS = 2
LEARNED_ITERATIONS = 5


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    laboratory = Laboratory(tmp_path_factory.mktemp("undisturbed"), TINY)
    laboratory.iterate(ITERATIONS)
    return laboratory


def test_the_same_seed_gives_the_same_digests(undisturbed: Laboratory, tmp_path: Path) -> None:
    again = Laboratory(tmp_path, TINY)
    again.iterate(ITERATIONS)
    assert again.digests(*KINDS) == undisturbed.digests(*KINDS)
    assert len(undisturbed.digests("rollouts")["rollouts"]) == ITERATIONS


def test_another_seed_gives_other_rollouts(undisturbed: Laboratory, tmp_path: Path) -> None:
    other = Laboratory(tmp_path, TINY, ("seed=4",))
    other.iterate(1)
    assert not set(other.digests("rollouts")["rollouts"]) & set(undisturbed.digests("rollouts")["rollouts"])


def test_kills_while_the_base_policy_is_made_change_nothing(undisturbed: Laboratory, tmp_path: Path) -> None:
    laboratory = Laboratory(tmp_path, TINY)
    kill_repeatedly(laboratory, ITERATIONS, kills=4, seconds=(2, 6))
    laboratory.iterate(ITERATIONS)
    assert laboratory.digests(*KINDS, "group") == undisturbed.digests(*KINDS, "group")


def test_ten_kills_while_a_policy_acts_and_learns_change_nothing(learned: Laboratory, tmp_path: Path) -> None:
    laboratory = Laboratory(tmp_path, learned.experiment_file, learned.overrides)
    laboratory.take_base_from(learned)
    kill_repeatedly(laboratory, LEARNED_ITERATIONS, kills=10, seconds=(3, 8))
    laboratory.iterate(LEARNED_ITERATIONS)
    assert laboratory.digests(*KINDS, "group") == learned.digests(*KINDS, "group")
    assert decisions(laboratory) == decisions(learned)
    rewards = learned.artifact("rewards", "0001").table("rewards.parquet")["reward"].to_pylist()
    assert 0 < sum(reward >= 1 for reward in rewards) < len(rewards), "a policy that never acts proves nothing"
    deadline = time.monotonic() + 30
    while (left := list(processes_of(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == [], "a killed run leaves no process behind"


def kill_repeatedly(laboratory: Laboratory, iterations: int, *, kills: int, seconds: tuple[float, float]) -> None:
    """Start the same command `kills` times and SIGKILL it at a random instant each time."""
    clock = random.Random(11)
    command = laboratory.command("iterate", *laboratory.settings, "-n", str(iterations))
    for delivered in range(kills):
        process = subprocess.Popen(
            command, cwd=laboratory.folder, env=laboratory.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            process.wait(timeout=clock.uniform(*seconds))
            pytest.fail(f"ended by itself with code {process.returncode} after {delivered} of {kills} kills")
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()


def decisions(laboratory: Laboratory) -> list[tuple[str, str]]:
    """(decision, candidate) of every iteration in order."""
    history = laboratory.json("status", "-e", laboratory.experiment.name)
    return [(each["decision"], each["policy"]) for each in history[0]["iterations"]]


def test_rematerializing_an_old_iteration_samples_nothing_and_promotes_nothing(learned: Laboratory) -> None:
    groups, live = learned.digests("group"), Registry(learned.store, "laboratory").history()
    code = (
        "import sys; from triplane_dagster.run import open_instance, open_runner; from resources.experiment import"
        " load_experiment\nexperiment = load_experiment(sys.argv[1], sys.argv[2:])\nwith open_instance() as instance,"
        " open_runner(experiment, instance) as runner: runner.iteration('0002')"
    )
    command = [sys.executable, "-c", code, str(learned.experiment_file), *learned.overrides]
    subprocess.run(command, cwd=learned.folder, env=learned.env, check=True, timeout=300, capture_output=True)
    assert learned.digests("group") == groups
    assert Registry(learned.store, "laboratory").history() == live


def test_lineage_walks_both_ways(learned: Laboratory) -> None:
    # which checkpoints the gate lets through depends on the machine's bits
    promoted = next(
        f"{each:04}"
        for each in range(4)
        if learned.artifact("checkpoint", f"{each:04}").ref.digest
        == learned.artifact("rollouts", f"{each + 1:04}").manifest.parents["policy"].digest
    )
    dataset = learned.artifact("dataset", promoted)
    episode = dataset.table("train.parquet")["episode_id"][0].as_py()
    found = learned.json("lineage", episode)
    assert {"checkpoint", "task_suite", "prompts"} <= {step["kind"] for step in found["made_of"]}
    assert found["episode"]["image_digest"] and found["starts"][0]["config"]["group_size"]
    trained = learned.artifact("checkpoint", promoted).ref.digest
    assert trained in {checkpoint for use in found["datasets"] for checkpoint in use["checkpoints"]}
    from_checkpoint = learned.json("lineage", trained[:16])
    assert dataset.ref.digest in {step["digest"] for step in from_checkpoint["made_of"]}
    later = learned.artifact("rollouts", "0004").manifest.parents["policy"].digest
    assert later == trained or later in {step["digest"] for step in from_checkpoint["made_into"]}


def test_nothing_temporary_is_left(learned: Laboratory) -> None:
    store = learned.folder / ".triplane" / "store"
    assert list((store / "tmp").iterdir()) == []
    assert list(list_artifacts(learned.store, "trainer_snapshot")) == []
