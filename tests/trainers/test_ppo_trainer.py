"""A PPO trainer that knows the bridge's client alone learns from episodes over it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainers.publishing import PolicyServer

pytestmark = pytest.mark.trainers


def train(server: PolicyServer, **options: Any) -> dict[str, list[float]]:
    """Imported here: the default suite collects this file, and transformers takes seconds."""
    from tests.trainers import ppo_trainer

    return ppo_trainer.train(server, **options)


def test_ppo_with_its_own_value_head_raises_held_out_solving(tmp_path: Path) -> None:
    with PolicyServer(sys.executable, tmp_path) as server:
        found = train(server, iterations=40, episodes=512, seed=1)
    before, after = found["held_out"]
    print(f"held-out solving {before:.1f}% -> {after:.1f}%; trained {[round(each) for each in found['trained']]}")
    assert after >= before + 15
    # what the bridge served is what was trained
    assert max(found["difference"]) < 1e-3


def test_ppo_learns_nothing_from_permuted_rewards(tmp_path: Path) -> None:
    with PolicyServer(sys.executable, tmp_path) as server:
        found = train(server, iterations=40, episodes=512, seed=1, permute=True)
    before, after = found["held_out"]
    print(f"held-out solving with permuted rewards {before:.1f}% -> {after:.1f}%")
    assert after < before + 10
