"""Iterations of the whole graph whose training two processes share: what they train is what the engine serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.laboratory import ROOT, Laboratory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
TINY = ROOT / "tests" / "dagster" / "tiny.yaml"
BACKENDS = {
    "fsdp2": (
        "trainer.launcher.backend=fsdp2",
        "trainer.launcher.expert_ranks=2",
        "trainer.launcher.starter=torchrun",
    ),
    "deepspeed": (
        "trainer.launcher.backend=deepspeed",
        "trainer.launcher.zero_stage=3",
        "trainer.launcher.starter=deepspeed",
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_train_policies_that_are_deployed_and_served(tmp_path: Path, backend: str) -> None:
    laboratory = Laboratory(tmp_path, TINY, (*BACKENDS[backend], "trainer.launcher.ranks=2"))
    laboratory.iterate(2)
    assert laboratory.artifact("sampler", "0001").meta["decision"] == "live"
    first, second = (laboratory.artifact("checkpoint", number) for number in ("0000", "0001"))
    numerics = second.manifest.config["numerics"]
    assert (numerics["backend"], numerics["ranks"]) == (backend, 2)
    assert second.manifest.parents["checkpoint"] == first.ref
    # the second iteration's episodes were sampled from the first one's policy
    assert second.meta["mismatch_k3"] < 1e-9 and second.meta["sampler_mismatch_max"] < 1e-4
