"""Servers that share a GPU take turns, however their settings name it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from inference.engines.config import VllmConfig
from inference.engines.vllm_server import devices_owner, lock_devices


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.parametrize(
    ("held", "wanted"), [((), ()), ((), (0,)), ((1,), ()), ((0, 1), (1, 2)), ((0, 1), (1, 0)), ((3, 1, 2), (2,))]
)
def test_a_gpu_in_common_is_waited_for_and_its_holder_named(held: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    stale = lock_devices(VllmConfig(devices=(0, 1, 2)), "an earlier server")
    assert stale is not None
    for each in stale:
        each.close()
    first = lock_devices(VllmConfig(devices=held), "the first")
    assert first is not None and lock_devices(VllmConfig(devices=wanted), "the second") is None
    assert devices_owner(VllmConfig(devices=wanted)) == f"process {os.getpid()} (the first)"
    for each in first:
        each.close()
    assert lock_devices(VllmConfig(devices=wanted), "the second") is not None


def test_other_gpus_are_free_also_after_a_refusal() -> None:
    held = lock_devices(VllmConfig(devices=(1,)), "the first")
    assert held is not None and lock_devices(VllmConfig(devices=(0, 1)), "the second") is None
    assert lock_devices(VllmConfig(devices=(0, 2)), "the third") is not None
