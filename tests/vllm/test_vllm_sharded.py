"""What two processes trained, real vLLM serves: the next iteration's episodes have the trainer's log-probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.acceptance.laboratory import Laboratory
from tests.acceptance.test_sharded_iterations import BACKENDS, TINY
from tests.vllm.conftest import real_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_vllm_samples_from_what_two_ranks_trained(tmp_path: Path, backend: str) -> None:
    values: dict[str, Any] = yaml.safe_load(TINY.read_text())
    values["engine"] = real_config().model_dump(mode="json", exclude_defaults=True) | {"kind": "vllm"}
    experiment = tmp_path / "tiny.yaml"
    experiment.write_text(yaml.safe_dump(values))
    laboratory = Laboratory(tmp_path / "laboratory", experiment, (*BACKENDS[backend], "trainer.launcher.ranks=2"))
    laboratory.iterate(2)
    first, second = (laboratory.artifact("checkpoint", number) for number in ("0000", "0001"))
    assert second.manifest.config["numerics"]["ranks"] == 2
    rollouts = laboratory.artifact("rollouts", "0001")
    assert rollouts.manifest.parents["policy"] == first.ref, "sampled from the first iteration's policy"
    print(backend, second.meta["mismatch_k3"], second.meta["sampler_mismatch_max"])
    assert second.meta["mismatch_k3"] < 1e-6 and second.meta["sampler_mismatch_max"] < 1e-4
