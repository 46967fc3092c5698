"""Settings that differ from those of the work that is shown are found, step by step; equal ones never are."""

from __future__ import annotations

from pathlib import Path

import pytest
from dagster_world import World

from contracts.store import open_store
from resources.experiment import load_experiment
from triplane_dagster.settings import changed_steps

TINY = Path(__file__).parent / "tiny.yaml"


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("iterations=5", []),
        ("engine.threads=2", []),
        ("trainer.learning_rate=0.5", ["checkpoint"]),
        ("trainer.launcher.threads=2", ["base_policy", "checkpoint"]),
        ("evaluation.held_out_samples=0", ["evaluation"]),
        ("evaluation.greedy=false", ["evaluation"]),
        ("base.demonstrations.count=65", ["base_policy"]),
        ("tasks.train=25", ["task_suite"]),
        ("seed=4", ["base_policy", "prompts", "rollouts", "checkpoint", "evaluation"]),
    ],
)
def test_changed_settings_are_named_by_step(ran: World, override: str, changed: list[str]) -> None:
    assert changed_steps(ran.store, load_experiment(TINY, [override]), ["0001"]) == changed


def test_empty_store_has_no_changed_settings(ran: World, tmp_path: Path) -> None:
    assert changed_steps(open_store(str(tmp_path)), ran.experiment, []) == []
