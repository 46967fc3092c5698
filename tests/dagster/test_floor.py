"""A candidate is compared with the best policy so far, so that small losses do not add up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter
from contracts.digests import digest_of
from contracts.store import Store, open_store
from ops.deploy_decision import check_gate
from ops.evaluation import compare
from ops.floor import compare_with_floor, find_floor, lineage
from ops.gate_power import gate_note
from ops.readings import gate_reading
from resources.errors import NotMaterialized
from resources.experiment import Experiment
from resources.registry import BasePolicy, Registry

EXPERIMENT = Experiment(name="floor")
TASKS = 200


def policy(name: str, kind: str = "checkpoint") -> ArtifactRef:
    return ArtifactRef(kind=kind, key=digest_of([name, kind]), digest=digest_of([kind, name]))


SUITE, BASE, STATE = policy("suite", "task_suite"), policy("base"), policy("state", "trainer_state")


def play(store: Store, name: str, solved: int, experiment: Experiment = EXPERIMENT) -> Artifact:
    """The gate run of a policy that solves the first `solved` of TASKS tasks, twice each."""
    key = gate_reading(experiment).work(store, experiment, policy(name), SUITE).key
    rows = [{"task_id": f"t{task:03d}", "solved": task < solved} for task in range(TASKS) for _ in range(2)]
    with ArtifactWriter(store, "evaluation_run", key, parents={}, config={"of": name}, code_version="1") as out:
        out.add_table("rewards.parquet", pa.Table.from_pylist(rows))
        return out.commit()


def promote(store: Store, *names: str) -> Registry:
    """Each policy goes live over the one before it, the first over the base policy."""
    registry = Registry(store, EXPERIMENT.name)
    for number, (parent, name) in enumerate(zip(["base", *names], names, strict=False)):
        assert registry.promote(policy(name), STATE, parent=policy(parent).digest, iteration=f"{number:04d}")
    return registry


def evaluation(store: Store, candidate: Artifact, parent: str, runs: dict[str, Artifact]) -> Artifact:
    """The `evaluation` artifact of a candidate, as the step writes it."""
    floor = find_floor(store, EXPERIMENT, policy(parent), BASE, SUITE)
    assert floor is not None
    gate: dict[str, Any] = compare(candidate, runs[parent], 0.9)
    gate["floor"] = compare_with_floor(candidate, floor, 0.9)
    with ArtifactWriter(
        store, "evaluation", digest_of([candidate.ref.digest]), parents={}, config={}, code_version="2"
    ) as out:
        out.add_json("evaluation.json", {"gate": gate})
        return out.commit()


def test_the_best_so_far_is_the_ancestor_of_the_highest_gate_rate(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for name, solved in (("base", 60), ("a", 90), ("b", 150), ("c", 140), ("refused", 199)):
        play(store, name, solved)
    promote(store, "a", "b", "c")
    found = find_floor(store, EXPERIMENT, policy("c"), BASE, SUITE)
    assert found is not None
    assert (found.policy, found.considered, found.without_run) == (policy("b"), 4, ())
    before = find_floor(store, EXPERIMENT, policy("a"), BASE, SUITE)
    assert before is not None and before.policy == policy("a")  # what came later changes no earlier decision


def test_of_equal_policies_the_youngest_is_compared(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for name in ("base", "a", "b"):
        play(store, name, 100)
    promote(store, "a", "b")
    found = find_floor(store, EXPERIMENT, policy("b"), BASE, SUITE)
    assert found is not None and found.policy == policy("b")


def test_floor_ignores_rolled_back_policies(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    registry = promote(store, "a", "b")
    registry.rollback(registry.restorable(None, BasePolicy(BASE, lambda: STATE)), "it cheats", expected=2)
    assert lineage(registry, policy("a"), BASE) == [BASE, policy("a")]
    assert registry.promote(policy("c"), STATE, parent=policy("a").digest, iteration="0002")
    assert lineage(registry, policy("c"), BASE) == [BASE, policy("a"), policy("c")]


def test_an_ancestor_without_a_run_of_these_settings_is_left_out_and_named(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    play(store, "base", 60), play(store, "b", 90)
    promote(store, "a", "b")
    found = find_floor(store, EXPERIMENT, policy("b"), BASE, SUITE)
    assert found is not None
    assert (found.policy, found.considered, found.without_run) == (policy("b"), 2, (policy("a").digest,))
    assert find_floor(store, EXPERIMENT, policy("b"), BASE, policy("other", "task_suite")) is None


def test_floor_refuses_losses_that_the_parent_comparison_accepts(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    runs = {name: play(store, name, solved) for name, solved in (("base", 100), ("a", 170), ("b", 163))}
    promote(store, "a", "b")
    candidate = play(store, "candidate", 158)
    found = check_gate(evaluation(store, candidate, "b", runs), policy("b"), 0.05)
    assert not found.holds
    parent, best = found.sentence.split("; ")
    assert parent.startswith("candidate is non-inferior to its parent: -0.025")
    assert best.startswith(
        f"candidate is not shown to be non-inferior to the best policy so far, {policy('a').digest[:12]}: -0.060"
    )


def test_a_candidate_as_good_as_the_best_passes_both(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    runs = {name: play(store, name, solved) for name, solved in (("base", 100), ("a", 170), ("b", 168))}
    promote(store, "a", "b")
    assert check_gate(evaluation(store, play(store, "candidate", 169), "b", runs), policy("b"), 0.05).holds
    alone = check_gate(evaluation(store, play(store, "other", 171), "a", runs), policy("a"), 0.05)
    assert alone.holds and alone.sentence.endswith("its parent is the best policy so far on the gate")


def test_an_evaluation_without_a_floor_is_refused_with_the_fix(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with ArtifactWriter(store, "evaluation", digest_of("old"), parents={}, config={}, code_version="1") as out:
        out.add_json("evaluation.json", {"gate": {"difference": {"mean": 0.0, "low": -0.1, "high": 0.1, "n": 9}}})
        old = out.commit()
    with pytest.raises(NotMaterialized, match=r"made by version 1.*: materialize evaluation again, then sampler"):
        check_gate(old, BASE, 0.05)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, TASKS), min_size=1, max_size=6))
def test_floor_is_the_best_live_policy_of_the_lineage(
    tmp_path_factory: pytest.TempPathFactory, solved: list[int]
) -> None:
    store = open_store(str(tmp_path_factory.mktemp("floor")))
    names = [f"p{index}" for index in range(len(solved))]
    play(store, "base", 50)
    for name, count in zip(names, solved, strict=True):
        play(store, name, count)
    promote(store, *names)
    found = find_floor(store, EXPERIMENT, policy(names[-1]), BASE, SUITE)
    assert found is not None and found.considered == len(solved) + 1
    assert sum(found.run.table("rewards.parquet")["solved"].to_pylist()) == 2 * max([50, *solved])


def test_the_note_of_a_dry_run_gives_the_power_of_the_gate(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    body = {"name": "floor", "tasks": {"gate": 128}, "evaluation": {"gate_samples": 8}, "promotion": {"margin": 0.05}}
    note = gate_note(store, Experiment.model_validate(body))
    assert "with 128 tasks x 8 samples and a margin of 5 points this gate refuses a true 0 in " in note
    assert "a true -3 in " in note and "a true -5 in 95%" in note and "assumed: spread evenly" in note
    one = Experiment.model_validate({**body, "tasks": {"kind": "import", "suite": "0" * 64}})
    assert gate_note(store, one).endswith("the task suite is not imported yet")
