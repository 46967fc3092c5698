"""The learned laboratory: a smaller quickstart with a base policy that really acts, and five iterations on it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.acceptance.laboratory import ROOT, Laboratory
from tests.once import one_at_a_time, shared_folder

SMALLER = (
    "name=laboratory",
    "tasks.train=96",
    "tasks.gate=24",
    "tasks.held_out=24",
    "tasks.unseen=8",
    "prompts.groups=16",
    "prompts.reserve=4",
    "prompts.workers=2",
    "evaluation.gate_samples=1",
    "evaluation.held_out_samples=1",
    "evaluation.unseen_samples=1",
)


@pytest.fixture(scope="session")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    """Minutes to make, so that all processes of a run of pytest share it. $TRIPLANE_LABORATORY names a folder to keep
    it in, and to find it in again.
    """
    kept = os.environ.get("TRIPLANE_LABORATORY")
    folder = Path(kept) if kept else shared_folder(tmp_path_factory) / "laboratory"
    laboratory = Laboratory(folder, ROOT / "experiments" / "quickstart.yaml", SMALLER)
    with one_at_a_time(folder):
        laboratory.run("demo", *laboratory.settings, "--set", "iterations=5", "--json")
    return laboratory
