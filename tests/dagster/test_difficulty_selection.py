"""Training tasks are drawn by their difficulty: only those in the range, by the pinned estimates, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter
from contracts.store import Store, open_store
from contracts.suites import add_tasks
from contracts.tasks import Split, Task
from curation.errors import TaskError
from curation.tasks.difficulty.table import make_difficulty
from ops.difficulty import pinned_difficulty, require_difficulty
from ops.graph import PROMPTS
from ops.inputs import draw
from ops.replay import replay
from ops.state import IterationInputs, IterationState, Start
from resources.errors import ExperimentError, IterationRefused
from resources.experiment import Experiment, ForkConfig, parse_experiment
from resources.refs import write_ref
from triplane_dagster.dry_run import plan_of

RATES = {"never": [0, 0, 0, 0], "seldom": [1, 0, 0, 0], "often": [1, 1, 1, 0], "always": [1, 1, 1, 1]}


def task_of(name: str, split: Split = Split.TRAIN) -> Task:
    return Task(name, "f", split, "", {"a.py": b"1\n"}, {}, ("t.py::test_a",), b"", {})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


@pytest.fixture
def suite(store: Store) -> Artifact:
    with ArtifactWriter(store, "task_suite", "5" * 64, parents={}, config={}, code_version="1") as out:
        add_tasks(out, [*map(task_of, [*RATES, "untried"]), task_of("gate", Split.GATE)])
        return out.commit(meta={"tasks": 6})


def measured(suite: Artifact, rates: dict[str, list[int]], run: str = "run") -> Artifact:
    played = ArtifactRef(kind="agent_run", key="0" * 64, digest=(run.encode().hex() + "0" * 64)[:64])
    return make_difficulty(suite, {"run": played}, list(map(task_of, rates)), rates, 1, f"agent {run}")


def experiment_of(suite: Artifact, **difficulty: Any) -> Experiment:
    tasks = {"kind": "import", "suite": suite.ref.digest} | ({"difficulty": difficulty} if difficulty else {})
    return parse_experiment({"name": "one", "tasks": tasks, "prompts": {"groups": 2, "reserve": 0}})


def inputs_of(suite: Artifact, difficulty: ArtifactRef | None, cursor: int = 0) -> IterationInputs:
    other = ArtifactRef(kind="checkpoint", key="1" * 64, digest="1" * 64)
    return IterationInputs(
        experiment="one",
        iteration="0000",
        policy=other,
        start=Start(checkpoint=other, trainer_state=other),
        task_suite=suite.ref,
        base=other,
        cursor=cursor,
        difficulty=difficulty,
    )


def drawn(store: Store, experiment: Experiment, inputs: IterationInputs) -> set[str]:
    found = (draw(store, experiment, inputs.model_copy(update={"cursor": cursor})) for cursor in range(8))
    return {group.task_id for each in found for group in each.groups}


def test_only_training_tasks_in_the_range_are_drawn(store: Store, suite: Artifact) -> None:
    estimates = measured(suite, RATES)
    experiment = experiment_of(suite, low=0.25, high=0.75)
    inputs = inputs_of(suite, None)
    pinned = pinned_difficulty(store, experiment, inputs)
    assert pinned == estimates.ref
    assert drawn(store, experiment, inputs_of(suite, pinned)) == {"seldom", "often"}
    assert drawn(store, experiment_of(suite), inputs) == {*RATES, "untried"}
    assert pinned_difficulty(store, experiment_of(suite), inputs) is None


def test_newer_estimates_do_not_change_an_iteration_that_has_begun(store: Store, suite: Artifact) -> None:
    first = measured(suite, RATES)
    experiment, begun = experiment_of(suite, low=0.25, high=0.75), inputs_of(suite, first.ref)
    state = IterationState(experiment, store, "0000", {"iteration_inputs": first.ref}, begun)
    before = PROMPTS.work(state)
    newer = measured(suite, {"never": [1, 1, 0, 0]}, "another")
    assert pinned_difficulty(store, experiment, inputs_of(suite, None)) == newer.ref
    assert pinned_difficulty(store, experiment_of(suite, artifact=first.ref.digest[:8]), begun) == first.ref
    assert PROMPTS.work(state) == before
    assert drawn(store, experiment, begun) == {"seldom", "often"}


def test_prompts_name_the_estimates_as_parent_and_range_and_estimates_are_in_their_key(
    store: Store, suite: Artifact
) -> None:
    one, two = measured(suite, RATES), measured(suite, RATES | {"never": [1, 0, 0, 0]}, "another")

    def work(difficulty: ArtifactRef | None, **wanted: Any) -> Any:
        return PROMPTS.work(
            IterationState(experiment_of(suite, **wanted), store, "0000", {}, inputs_of(suite, difficulty))
        )

    plain = work(None)
    assert plain.parents == {"task_suite": suite.ref} and "tasks" not in plain.config
    selected = work(one.ref, low=0.1)
    assert selected.parents == {"task_suite": suite.ref, "difficulty": one.ref}
    keys = {plain.key, selected.key, work(two.ref, low=0.1).key, work(one.ref, low=0.2).key}
    assert len(keys) == 4
    begun_without = work(None, low=0.1)
    assert begun_without.key == plain.key, "an iteration that began without estimates draws from all tasks"
    assert work(one.ref).key == plain.key


def test_setting_leaves_no_trace_where_it_is_not_used(suite: Artifact) -> None:
    assert "difficulty" not in experiment_of(suite).model_dump(mode="json")["tasks"]
    assert "difficulty" not in inputs_of(suite, None).model_dump(mode="json")
    one, two = experiment_of(suite), experiment_of(suite, low=0.5)
    assert one.tasks.made_from == two.tasks.made_from
    assert PROMPTS.settings_digest(one) != PROMPTS.settings_digest(two)


def test_dry_run_tells_how_many_tasks_are_in_the_range(store: Store, suite: Artifact) -> None:
    estimates = measured(suite, RATES)

    def notes(experiment: Experiment) -> list[str | None]:
        return [step.note for step in plan_of(experiment, store) if step.step == "prompts"]

    assert notes(experiment_of(suite)) == [None]
    assert notes(experiment_of(suite, low=0.5)) == [
        "prompts: 2 of 5 training tasks have a pass rate in [0.5, 1], as difficulty"
        f" {estimates.ref.short} estimates it from 4 samples of agent run"
    ]


def test_missing_estimates_and_an_empty_range_are_refused_before_anything_is_made(
    store: Store, suite: Artifact
) -> None:
    experiment = experiment_of(suite, low=0.3, high=0.4)
    inputs = inputs_of(suite, None)
    for said in (f"no difficulty of task suite {suite.ref.short}", "none of 4 training tasks"):
        for refuse in (
            lambda: require_difficulty(store, experiment),
            lambda: pinned_difficulty(store, experiment, inputs),
            lambda: plan_of(experiment, store),
        ):
            with pytest.raises(TaskError, match=said) as raised:
                refuse()
            assert "\n" not in str(raised.value)
        measured(suite, RATES)
    require_difficulty(store, experiment_of(suite))


def test_range_of_a_suite_that_is_not_built_names_the_commands(store: Store) -> None:
    experiment = parse_experiment({"name": "one", "tasks": {"train": 8, "difficulty": {"low": 0.1}}})
    with pytest.raises(TaskError, match="run `triplane tasks build -e one`, then `triplane tasks difficulty -e one`"):
        require_difficulty(store, experiment)


def test_wrong_range_is_named_with_its_fix(suite: Artifact) -> None:
    with pytest.raises(ExperimentError, match=r"low 0.5 is above high 0.1"):
        experiment_of(suite, low=0.5, high=0.1)


def test_fork_repeats_prompts_that_were_drawn_by_difficulty_and_keeps_their_range(
    store: Store, suite: Artifact
) -> None:
    estimates, source = measured(suite, RATES), experiment_of(suite, low=0.25)
    inputs = inputs_of(suite, estimates.ref)
    prompts = PROMPTS.work(IterationState(source, store, "0000", {}, inputs))
    assert prompts is not None
    with prompts.writer() as out:
        out.add_json("prompts.json", draw(store, source, inputs).model_dump(mode="json"))
        drawn = out.commit()
    with ArtifactWriter(store, "iteration_inputs", "6" * 64, parents={}, config={}, code_version="1") as out:
        out.add_json("inputs.json", inputs.model_dump(mode="json"))
        pinned = out.commit()
    for asset, made in (("iteration_inputs", pinned), ("prompts", drawn), ("rollouts", drawn)):
        write_ref(store, "one", asset, "0000", made.ref)

    def forked(**difficulty: Any) -> Experiment:
        fork = {"experiment": "one", "iteration": "0000"}
        return experiment_of(suite, **difficulty).model_copy(update={"name": "two", "fork": ForkConfig(**fork)})

    own = inputs_of(suite, None).model_copy(update={"experiment": "two"})
    repeated = replay(store, forked(low=0.25), own)
    assert repeated.difficulty == pinned_difficulty(store, forked(low=0.25), repeated) == estimates.ref
    with pytest.raises(
        IterationRefused, match=r"^tasks.difficulty.low is 0.5 in two, but one/0000 was sampled with 0.25"
    ):
        replay(store, forked(low=0.5), own)
