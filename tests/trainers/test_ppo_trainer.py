"""A PPO trainer that knows the bridge's client alone learns quickstart's tasks from hosted episodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.conftest import Quickstart
from tests.trainers.publishing import PolicyServer

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(3600)]


def train(quickstart: Quickstart, folder: Path, *, permute: bool) -> dict[str, list[float]]:
    """Imported here: the default suite collects this file, and transformers takes seconds."""
    from tests.trainers import ppo_trainer

    with PolicyServer(quickstart.command, quickstart.environment, folder) as server:
        tasks = quickstart.train, quickstart.held_out
        found = ppo_trainer.train(server, quickstart.start, *tasks, permute)
    before, after = found["held_out"]
    name = "with permuted rewards " if permute else ""
    print(f"held-out solving {name}{before:.1f}% -> {after:.1f}%; trained {[round(each) for each in found['trained']]}")
    return found


def test_ppo_with_its_own_value_head_raises_held_out_solving(quickstart: Quickstart, tmp_path: Path) -> None:
    found = train(quickstart, tmp_path, permute=False)
    before, after = found["held_out"]
    assert after >= before + 15
    # what the bridge served is what was trained
    assert max(found["difference"]) < 1e-3


def test_ppo_learns_nothing_from_permuted_rewards(quickstart: Quickstart, tmp_path: Path) -> None:
    before, after = train(quickstart, tmp_path, permute=True)["held_out"]
    assert after < before + 10
