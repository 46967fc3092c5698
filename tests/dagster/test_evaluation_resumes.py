"""An interrupted evaluation resumes: committed tasks are not sampled again, and their verdicts are not repeated."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dagster_world import World
from evaluation_worker import TINY, play_base, unplayed

from contracts.artifacts import list_artifacts
from contracts.failpoints import KILL_VARIABLE
from contracts.store import Store
from inference.rollouts import ledger
from inference.rollouts.ledger import Sampled, read_ledger
from resources.experiment import load_experiment

ROOT = Path(__file__).parents[2]
RANDOM = ""
KILLS = (
    "task-sampled",
    RANDOM,
    "task-committed",
    RANDOM,
    "store-write:3",
    RANDOM,
    "task-committed:2",
    "artifact-staged",
    "before-manifest",
    "after-manifest",
)


def committed_tasks(store: Store) -> set[tuple[str, str]]:
    """(action key of the run, group) of every task that is committed as a part."""
    keys = [key.split("/") for key in store.list("artifacts/evaluation_run/")]
    return {(key[2], key[4]) for key in keys if key[3] == "parts"}


def committed_runs(store: Store) -> dict[str, str]:
    """Action key -> content digest."""
    return {run.ref.key: run.ref.digest for run in list_artifacts(store, "evaluation_run")}


def sampled(lines: list[Sampled]) -> set[tuple[str, str]]:
    return {(line.key, line.group) for line in lines}


def expected_runs(ran: World, store: Store) -> dict[str, str]:
    """Digests of the undisturbed runs with these keys."""
    undisturbed = committed_runs(ran.store)
    return {key: undisturbed[key] for key in committed_runs(store)}


def test_only_missing_and_damaged_tasks_are_played_again(
    ran: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, experiment = unplayed(ran.store, tmp_path / "store"), load_experiment(TINY)

    def lost(*_: object) -> None:
        raise ConnectionError("gone")

    with monkeypatch.context() as patch:
        patch.setattr("ops.evaluation._commit_run", lost)
        with pytest.raises(ConnectionError, match="gone"):
            play_base(experiment, store)
    kept = sorted(committed_tasks(store))
    assert kept and not committed_runs(store)
    key, group = kept[0]
    place = f"artifacts/evaluation_run/{key}/parts/{group}"
    half = store.get(place)[:-9]
    store.delete(place)
    store.create(place, half)

    monkeypatch.setattr(ledger, "_FOLDER", str(tmp_path / "ledger"))
    runs = play_base(experiment, store)
    again = sampled(list(read_ledger(tmp_path / "ledger")))
    assert (key, group) in again and not again & set(kept[1:])
    assert len(runs) == len(committed_runs(store)) == 5
    assert committed_runs(store) == expected_runs(ran, store)
    assert committed_tasks(store) == set()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_kills_of_an_evaluation_sample_no_committed_task_twice_and_change_no_digest(
    ran: World, tmp_path: Path
) -> None:
    store, asked, journal = unplayed(ran.store, tmp_path / "store"), tmp_path / "asked", tmp_path / "ledger"
    chance, tasks, verdicts, seen, answered = random.Random(4), set(), set(), 0, 0
    for order in (*KILLS, None):
        worker = start(store, asked, journal, order)
        if order == RANDOM:
            lines = len(list(read_ledger(journal)))
            wait_for_lines(worker, journal, lines + chance.randint(1, 4))
            time.sleep(chance.uniform(0, 0.2))
            worker.kill()
        assert worker.wait(600) == (0 if order is None else -signal.SIGKILL), order
        lines_now = list(read_ledger(journal))
        assert not sampled(lines_now[seen:]) & tasks, f"{order}: sampled although committed before"
        made = asked.read_text().split() if asked.exists() else []
        assert not set(made[answered:]) & verdicts, f"{order}: graded although the verdict was kept"
        print(f"{order}: {len(lines_now) - seen} turns, {len(made) - answered} verdicts", end="; ")
        seen, answered = len(lines_now), len(made)
        verdicts |= set(store.list("verdicts/"))
        tasks |= committed_tasks(store)
        print(f"{len(tasks)} tasks and {len(committed_runs(store))} runs are committed")
    assert committed_tasks(store) == set(), "parts of committed runs are removed"
    assert len(committed_runs(store)) == 5
    assert committed_runs(store) == expected_runs(ran, store)


def start(store: Store, asked: Path, journal: Path, order: str | None) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, Path(__file__).with_name("evaluation_worker.py"), store.url, asked],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
            "OMP_NUM_THREADS": "1",
            ledger.VARIABLE: str(journal),
            **({KILL_VARIABLE: order} if order else {}),
        },
    )


def wait_for_lines(worker: subprocess.Popen[bytes], journal: Path, count: int) -> None:
    while len(list(read_ledger(journal))) < count:
        assert worker.poll() is None, "the evaluation ended before the kill"
        time.sleep(0.005)
