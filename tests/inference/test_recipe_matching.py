"""Engines match the recipe that a checkpoint names, or refuse it by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from contracts.precision import FORWARD, Forward
from inference.engines.config import BuiltinConfig, OpenAIConfig, VllmConfig
from inference.engines.matching import server_mismatch
from inference.engines.policies import PolicyDirectory
from inference.engines.vllm import VllmEngine
from inference.engines.vllm_server import server_command, server_environment
from inference.errors import EngineError
from resources.errors import ExperimentError
from resources.experiment import parse_experiment

HOPPER = Forward("w8a8-1x128", "bfloat16", "float32", "bfloat16")
BF16 = Forward("bf16", "bfloat16", "float32", "bfloat16")
GPU = VllmConfig(weights="fp8")


def checkpoint(directory: Path, forward: Forward | None) -> Path:
    """A directory with no more than a config.json."""
    config: dict[str, Any] = {"model_type": "qwen3_moe", "quantization_config": {}}
    if forward is not None:
        config[FORWARD] = forward.entry()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_server_is_started_with_the_dtypes_of_the_recipe(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, HOPPER)
    command = server_command(GPU, "gpu", directory, 1)
    assert command[command.index("--dtype") + 1] == "bfloat16"
    assert json.loads(command[command.index("--hf-overrides") + 1]) == {"head_dtype": "float32"}
    assert server_environment(GPU, "gpu", directory, tmp_path)["VLLM_USE_DEEP_GEMM_E8M0"] == "0"
    narrow = server_command(GPU, "gpu", checkpoint(tmp_path, Forward("bf16", "bfloat16", "bfloat16", "bfloat16")), 1)
    assert "--hf-overrides" not in narrow


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_server_of_an_unnamed_recipe_is_started_as_before(tmp_path: Path, device: Any) -> None:
    directory = checkpoint(tmp_path, None)
    command = server_command(GPU, device, directory, 1)
    assert "--hf-overrides" not in command and ("--dtype" in command) == (device == "cpu")
    assert "VLLM_USE_DEEP_GEMM_E8M0" not in server_environment(GPU, device, directory, tmp_path)


@pytest.mark.parametrize("forward", [HOPPER, BF16, Forward("fp32")])
def test_vllm_matches_on_a_gpu(forward: Forward) -> None:
    assert server_mismatch("vLLM", forward, plain=False) is None


@pytest.mark.parametrize(
    ("forward", "plain", "named"),
    [
        (Forward("w8"), False, "recipe w8"),
        (HOPPER, True, "w8a8-1x128"),
        (Forward("w8a8-1x128", "float32", "float32", "bfloat16"), False, "trainer.precision.activations"),
        (Forward("w8a8-1x128", "bfloat16", "float32", "float32"), False, "trainer.precision.router_dtype"),
        (Forward("bf16", "bfloat16", "float32", "float32"), False, "trainer.precision.router_dtype"),
        (Forward("fp32", "float32", "bfloat16", "float32"), False, "trainer.precision.head_dtype"),
        (Forward("mxfp8", "bfloat16", "float32", "bfloat16"), False, "mxfp8"),
    ],
)
def test_vllm_refuses_by_name_what_it_does_not_compute(forward: Forward, plain: bool, named: str) -> None:
    reason = server_mismatch("vLLM", forward, plain)
    assert reason is not None and named in reason


def test_vllm_serves_dequantized_weights_of_w8_as_the_trainer_computes_them() -> None:
    assert server_mismatch("vLLM", Forward("w8"), plain=True) is None


@pytest.mark.anyio
async def test_vllm_engine_refuses_before_it_starts_a_server(tmp_path: Path) -> None:
    engine = VllmEngine(
        VllmConfig(weights="fp8", python="/nonexistent"), PolicyDirectory(checkpoint(tmp_path, Forward("w8")), "v")
    )
    with pytest.raises(EngineError, match=r"recipe w8 does not.*engine\.unmatched"):
        await engine.version()
    await engine.close()


def test_experiment_refuses_a_pair_that_no_device_matches() -> None:
    values = {"name": "x", "trainer": {"precision": {"kind": "bf16", "router_dtype": "float32"}}}
    assert parse_experiment(values).trainer.precision.kind == "bf16", "the built-in engine matches it"
    with pytest.raises(ExperimentError, match=r"router_dtype"):
        parse_experiment({**values, "engine": {"kind": "vllm"}})
    parse_experiment({**values, "engine": {"kind": "vllm", "unmatched": "warn"}})


def test_engines_that_match_or_say_so_themselves_are_not_judged() -> None:
    odd = Forward("mxfp8")
    assert VllmConfig().mismatch(odd) and BuiltinConfig().mismatch(odd) is None, "the built-in engine computes all"
    assert OpenAIConfig(base_url="http://127.0.0.1:1/v1").mismatch(odd) is None
