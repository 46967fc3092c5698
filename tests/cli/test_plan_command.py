"""`triplane plan` and the memory in a dry run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from contracts.errors import ConfigError
from inference.engines.config import VllmConfig
from inference.engines.vllm_memory import engine_memory, flag
from resources.experiment import load_experiment
from triplane_dagster.cli.app import app
from triplane_dagster.memory import PUBLISHED, plan_experiment, training_note

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
LARGE = dict(PUBLISHED["Qwen3-30B-A3B"])


def run(*arguments: str) -> str:
    found = CliRunner().invoke(app, ["plan", *arguments])
    assert found.exit_code == 0, found.output
    return found.output


def test_plan_tells_kinds_moments_and_limits_as_json() -> None:
    found = json.loads(run("--json", "--set", "trainer.microbatch_tokens=2048"))
    less = json.loads(run("--json", "--set", "trainer.microbatch_tokens=1024"))
    assert set(found["moments"]) == {"load", "score", "backward", "step", "publish"}
    assert found["peak"] == max(sum(held.values()) for held in found["moments"].values())
    assert less["moments"]["backward"]["activations"] < found["moments"]["backward"]["activations"]
    assert less["moments"]["backward"]["masters"] == found["moments"]["backward"]["masters"]


def test_plan_explains_every_kind_in_a_table() -> None:
    text = run("-e", "quickstart")
    assert "optimizer moments" in text and "AdamW" in text and "bytes a parameter" in text and "Free memory" in text


@pytest.mark.parametrize("path", sorted(EXPERIMENTS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_experiment_has_a_plan_that_vllm_accepts(path: Path) -> None:
    plan = plan_experiment(load_experiment(path))
    assert plan.training.peak > 0
    assert plan.engine is None or not plan.engine.problems


def test_model_of_unknown_shape_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump({"name": "x", "base": {"kind": "import", "path": str(tmp_path / "Nothing-1B")}}))
    with pytest.raises(ConfigError, match=r"no published shape is called Nothing-1B"):
        plan_experiment(load_experiment(file))
    assert training_note(load_experiment(file)).startswith("memory: not planned (base.path=")


def test_shape_comes_from_the_checkpoint_where_it_exists(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LARGE, "num_hidden_layers": 2}))
    file = tmp_path / "x.yaml"
    file.write_text(yaml.safe_dump({"name": "x", "base": {"kind": "import", "path": str(tmp_path)}}))
    found = plan_experiment(load_experiment(file))
    assert found.model == str(tmp_path / "config.json") and found.work.config["num_hidden_layers"] == 2


def test_experts_narrower_than_an_fp8_block_are_found() -> None:
    def problems(**config: object) -> tuple[str, ...]:
        return engine_memory(VllmConfig.model_validate(config), LARGE, 16384, 64).problems

    (words,) = problems(tensor_parallel=8)
    assert "768 into 96 columns" in words and "--enable-expert-parallel" in words and "lower it to 2" in words
    assert not problems(tensor_parallel=8, flags=["--enable-expert-parallel"])
    assert not problems(tensor_parallel=2) and problems(tensor_parallel=4)


def test_engine_memory_counts_weights_and_cache_of_one_gpu() -> None:
    one, two, many = (engine_memory(VllmConfig(tensor_parallel=count), LARGE, 100, 3) for count in (1, 2, 8))
    assert one.weights == pytest.approx(30.5e9, rel=0.05) and two.weights == one.weights // 2
    assert one.token == 2 * 48 * 4 * 128 * 2 and two.token == one.token // 2
    assert many.token == one.token // 4, "four key heads can't be divided among eight GPUs"
    assert one.cache == 300 * one.token and one.room(one.weights) == 0
    small = engine_memory(VllmConfig(flags=("--kv-cache-dtype=fp8", "--max-model-len", "50")), LARGE, 100, 3)
    assert small.token == one.token // 2 and small.context == 50


def test_last_value_of_a_flag_counts() -> None:
    assert flag(["--a", "1", "--a=2"], "--a") == "2" and flag(["--b"], "--a") is None
