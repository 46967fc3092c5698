"""Fixtures of the trainer's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trainer_world import World, make_world


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path)
