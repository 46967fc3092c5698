"""Difficulty of tasks: estimates and their coverage, features of a fix, agents over a suite, selection by a range."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from contracts.artifacts import Artifact, ArtifactWriter, list_artifacts
from contracts.store import Store, open_store
from contracts.suites import add_tasks
from contracts.tasks import Split, Task
from curation.errors import TaskError
from curation.statistics import solved_by_task
from curation.tasks.agents import Observation, Oracle
from curation.tasks.bugs import file_diff
from curation.tasks.difficulty.config import DifficultyConfig
from curation.tasks.difficulty.estimates import estimate, pass_at_k
from curation.tasks.difficulty.features import features_of
from curation.tasks.difficulty.playing import AgentRun, run_agent, run_outcomes
from curation.tasks.difficulty.table import difficulty_rows, find_difficulty, make_difficulty, task_rates
from curation.tasks.inspect import suite_tasks
from envd.client import Limits, SandboxClient, ToolCall
from envd.local import TRUSTED, LocalEnvd


@pytest.mark.parametrize("samples", [4, 8, 16, 32])
def test_intervals_cover_the_true_rates_in_95_percent_of_1000_simulated_suites(samples: int) -> None:
    random = np.random.default_rng(0)
    truth = random.uniform(0, 1, (1000, 20))  # suites, tasks
    intervals = [estimate(solved, samples, 1) for solved in range(samples + 1)]
    low, high = (np.array([getattr(each, end) for each in intervals]) for end in ("low", "high"))
    solved = random.binomial(samples, truth)
    covered = (low[solved] <= truth) & (truth <= high[solved])
    assert 0.94 <= covered.mean() <= 0.96


@pytest.mark.parametrize("samples", [2, 4, 8, 16, 64])
def test_mean_coverage_over_all_rates_is_that_of_the_interval(samples: int) -> None:
    rates = (np.arange(20_000) + 0.5) / 20_000
    covered = np.zeros_like(rates)
    for solved in range(samples + 1):
        each = estimate(solved, samples, 1)
        chance = math.comb(samples, solved) * rates**solved * (1 - rates) ** (samples - solved)
        covered += np.where((each.low <= rates) & (rates <= each.high), chance, 0)
    assert 0.94 <= covered.mean() <= 0.96


@pytest.mark.parametrize(("solved", "samples"), [(0, 5), (1, 5), (3, 5), (5, 5), (2, 7)])
def test_pass_at_k_is_the_share_of_subsets_with_a_solved_sample(solved: int, samples: int) -> None:
    outcomes = [1] * solved + [0] * (samples - solved)
    for k in range(1, samples + 1):
        subsets = [any(chosen) for chosen in itertools.combinations(outcomes, k)]
        assert pass_at_k(solved, samples, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


def test_task_without_enough_graded_samples_has_no_pass_at_k() -> None:
    assert estimate(1, 3, 4).pass_at_k is None
    nothing = estimate(0, 0, 1)
    assert (nothing.rate, nothing.low, nothing.high, nothing.pass_at_k) == (None, 0.0, 1.0, None)
    with pytest.raises(ValueError, match="4 of 3 samples"):
        estimate(4, 3, 1)


BEFORE = """\
import math


def area(r):
    return math.pi * r


class Ring:
    def width(self):
        def half():
            return 1
        return half()


LIMIT = 3
"""


def task_of(name: str = "t", split: Split = Split.TRAIN, after: str | None = None, **meta: object) -> Task:
    fixed = after or BEFORE.replace("pi * r", "pi * r * r")
    return Task(
        task_id=name,
        family="f",
        split=split,
        instruction="Repair area.",
        files={"pack.py": BEFORE.encode(), "README": b"--- a/x\n"},
        hidden_files={"test_p.py": b"from pack import area\n\n\ndef test_area():\n    assert 12 < area(2) < 13\n"},
        tests=("test_p.py::test_area",),
        reference_diff=file_diff("pack.py", BEFORE, fixed),
        meta={"path": "pack.py", **meta},
    )


@pytest.mark.parametrize(
    ("after", "functions", "lines"),
    [
        (BEFORE.replace("pi * r", "pi * r * r"), 1, 2),
        (BEFORE.replace("pi * r", "pi * r * r").replace("return 1", "return 2"), 2, 4),
        (BEFORE.replace("        return half()\n", "        # one\n        return half()\n"), 1, 1),
        (BEFORE.replace("LIMIT = 3", "-- LIMIT\n++ LIMIT\n@@ -1 +1 @@"), 0, 4),
        ("'''Rings.'''\n" + BEFORE, 0, 1),
    ],
)
def test_features_count_what_the_fix_changes(after: str, functions: int, lines: int) -> None:
    found = features_of(task_of(after=after))
    assert (found.files, found.functions, found.changed_lines, found.tests) == (1, functions, lines, 1)
    assert (found.fail_to_pass, found.strategy, found.operator) == (None, None, None)


def test_features_name_new_files_and_how_the_bug_was_made() -> None:
    task = task_of(strategy="mutate", operator="swap", fail_to_pass=["test_p.py::test_area"])
    both = Task(
        **vars(task) | {"reference_diff": task.reference_diff + file_diff("new.py", None, "def f():\n    pass\n")}
    )
    found = features_of(both)
    assert (found.files, found.functions, found.changed_lines, found.fail_to_pass) == (2, 1, 4, 1)
    assert (found.strategy, found.operator) == ("mutate", "swap")
    broken = Task(**vars(task) | {"files": {"pack.py": b"def area(:\n" + BEFORE.encode()}})
    assert features_of(broken).functions is None


def published(store: Store, tasks: Sequence[Task], key: str = "a") -> Artifact:
    with ArtifactWriter(store, "task_suite", key * 64, parents={}, config={}, code_version="1") as out:
        add_tasks(out, tasks)
        return out.commit(meta={"tasks": len(tasks)})


class Halting:
    """Solves even samples; ends the process's work at the given number of calls."""

    def __init__(self, most: int = 1_000_000) -> None:
        self.asked, self._most, self._oracle = 0, most, Oracle()

    def act(self, task: Task, observation: Observation) -> Sequence[ToolCall]:
        self.asked += not observation.turns
        if self.asked > self._most:
            raise TaskError("stopped")
        return self._oracle.act(task, observation) if observation.sample % 2 == 0 else ()


@pytest.mark.slow
def test_stopped_agent_run_goes_on_with_the_tasks_that_are_missing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    suite = published(
        store,
        [task_of(name, split) for name, split in zip("abcdef", [*[Split.TRAIN] * 4, *[Split.GATE] * 2], strict=True)],
    )
    tasks = list(suite_tasks(suite).values())
    run = AgentRun("half", 3, 5, Limits())

    async def play(agent: Halting) -> Artifact:
        async with SandboxClient(envd.address) as client:
            return await run_agent(run, agent, suite.ref, tasks, store, client)

    with LocalEnvd(rules=TRUSTED) as envd:
        with pytest.raises(TaskError, match="stopped"):
            asyncio.run(play(Halting(12)))
        assert not list(list_artifacts(store, "agent_run")) and not list(list_artifacts(store, "difficulty"))
        second = Halting()
        made = asyncio.run(play(second))
        assert 0 < second.asked < 18 and second.asked % 3 == 0, "whole tasks were kept"
        again = Halting()
        assert asyncio.run(play(again)).ref == made.ref and not again.asked
    outcomes = solved_by_task(run_outcomes(made))
    assert outcomes == {name: [1, 0, 1] for name in "abcdef"}
    difficulty = make_difficulty(suite, {"run": made.ref}, tasks, outcomes, 2, "agent half")
    assert make_difficulty(suite, {"run": made.ref}, tasks, outcomes, 2, "agent half").ref == difficulty.ref
    assert difficulty.manifest.parents == {"task_suite": suite.ref, "run": made.ref}
    (first, *_) = difficulty_rows(difficulty)
    assert (first["task_id"], first["samples"], first["solved"], first["pass_at_k"]) == ("a", 3, 2, 1.0)
    assert first["low"] < first["rate"] < first["high"]
    assert difficulty.meta["splits"] == {"train": 4, "gate": 2}


def test_newest_difficulty_with_training_tasks_is_found_or_the_command_named(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    suite = published(store, [task_of("a"), task_of("b"), task_of("g", Split.GATE)])
    other = published(store, [task_of("z")], "b")
    tasks = [task_of("a"), task_of("b")]
    with pytest.raises(TaskError, match=f"no difficulty of task suite {suite.ref.short} .* tasks difficulty --suite"):
        find_difficulty(store, suite.ref)
    one = make_difficulty(suite, {"run": suite.ref}, tasks, {"a": [1, 0]}, 1, "agent one")
    two = make_difficulty(suite, {"run": other.ref}, tasks, {"a": [1, 1], "b": [0, 0]}, 1, "agent two")
    make_difficulty(suite, {"run": suite.ref}, [task_of("g", Split.GATE)], {"g": [1]}, 2, "agent three")
    make_difficulty(other, {"run": other.ref}, [task_of("z")], {"z": [1]}, 1, "agent four")
    assert find_difficulty(store, suite.ref).ref == two.ref
    assert find_difficulty(store, suite.ref, one.ref.digest[:8]).ref == one.ref
    assert task_rates(one) == {"a": 0.5, "b": None}
    with pytest.raises(TaskError, match="'00000000' matches 0 difficulties of task suite"):
        find_difficulty(store, suite.ref, "00000000")


def test_range_admits_its_ends_and_no_task_that_was_never_tried() -> None:
    wanted = DifficultyConfig(low=0.25, high=0.75)
    assert [wanted.admits(rate) for rate in (0.2, 0.25, 0.5, 0.75, 0.8, None)] == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(ValueError, match=r"low 0.5 is above high 0.1: exchange them"):
        DifficultyConfig(low=0.5, high=0.1)
