from __future__ import annotations

from pathlib import Path

import pytest
from dagster_world import World, run_world

from resources.refs import require_ref
from triplane_dagster.iterations import decision_of

STEPS = ("prompts", "rollouts", "rewards", "dataset", "checkpoint", "evaluation")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_digests_and_decisions_in_another_store(ran: World, tmp_path: Path) -> None:
    name = ran.experiment.name
    before = {step: require_ref(ran.store, name, step, "0001").digest for step in STEPS}
    for other in run_world(ran.experiment, 2, tmp_path):
        assert (
            require_ref(other.store, name, "base_policy").digest == require_ref(ran.store, name, "base_policy").digest
        )
        assert {step: require_ref(other.store, name, step, "0001").digest for step in before} == before
        decision = decision_of(other.store, ran.experiment, "0001")
        assert decision is not None and decision == decision_of(ran.store, ran.experiment, "0001")
