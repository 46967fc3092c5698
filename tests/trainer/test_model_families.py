"""Dense Qwen3 and Llama beside Qwen3-MoE: trainer, built-in engine and `transformers` compute the same."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from test_trainer_against_transformers import dequantized, episodes, hf_logprobs
from torch import Tensor
from trainer_world import TINY, World
from trainer_world import episodes as world_episodes

from contracts.artifacts import Artifact, open_artifact
from contracts.checkpoints import WEIGHTS, check_checkpoint
from contracts.episodes import TokenRole
from contracts.errors import SchemaError
from inference.engines.base import SamplingParams
from inference.engines.builtin import BuiltinEngine
from inference.engines.probes import score_rows
from inference.engines.weights import read_weights
from inference.errors import EngineError
from resources.errors import ExperimentError
from resources.experiment import parse_experiment
from trainer.data import ScoredSequence, make_batch
from trainer.errors import TrainingConfigError
from trainer.export import checkpoint_tensors, load_checkpoint
from trainer.model import score
from trainer.model_config import ModelConfig
from trainer.parameters import Parameters, draw_masters
from trainer.run import run_job

transformers = pytest.importorskip("transformers")
VOCABULARY = 90
ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
MODELS = {
    "qwen3_moe": ModelConfig(**(TINY.model_dump() | {"initializer_range": 0.1})),
    "qwen3": ModelConfig(
        family="qwen3", layers=2, heads=4, kv_heads=2, head_dim=64, max_positions=64, initializer_range=0.1
    ),
    "llama": ModelConfig(
        family="llama",
        layers=2,
        heads=4,
        kv_heads=4,
        mlp_width=256,
        max_positions=64,
        rope_llama3=ROPE,
        tie_word_embeddings=False,
        initializer_range=0.1,
    ),
}


def checkpoint(folder: Path, family: str, seed: int = 0) -> tuple[Path, Parameters]:
    """An exported FP8 checkpoint of random weights, and the trainer's parameters."""
    config = MODELS[family].hf_config(VOCABULARY)
    parameters = Parameters.from_masters(config, draw_masters(config, seed))
    folder.mkdir(parents=True)
    save_file(checkpoint_tensors(parameters), folder / WEIGHTS, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder, parameters


def transformers_model(parameters: Parameters, folder: Path) -> Any:
    body = {name: value for name, value in parameters.config.items() if name != "quantization_config"}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(body))
    plain = {name: tensor.contiguous() for name, tensor in dequantized(checkpoint_tensors(parameters)).items()}
    save_file(plain, folder / WEIGHTS, {"format": "pt"})
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    if "experts" in str(body):
        model.set_experts_implementation("eager")  # the only one in float64
    assert not info["unexpected_keys"] and set(info["missing_keys"]) <= {"lm_head.weight"}
    return model


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_forward_and_gradients_equal_transformers(family: str, tmp_path: Path) -> None:
    directory, parameters = checkpoint(tmp_path / "policy", family)
    model = transformers_model(parameters, tmp_path / "plain")
    assert type(model).__name__ == check_checkpoint(directory)["architectures"][0]
    sequences = episodes(VOCABULARY)
    ours = score(parameters.leaves, parameters.config, make_batch(sequences)).logprobs
    theirs = torch.cat([hf_logprobs(model, sequence) for sequence in sequences])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    ours.mean().backward()
    theirs.mean().backward()
    reference = {name: tensor.grad for name, tensor in model.named_parameters()}
    assert set(reference) == set(parameters.leaves)
    for name, leaf in parameters.leaves.items():
        torch.testing.assert_close(leaf.grad, reference[name], atol=1e-5, rtol=1e-4, msg=name)


def test_the_scaled_rotary_frequencies_matter_at_this_size(tmp_path: Path) -> None:
    _, parameters = checkpoint(tmp_path / "policy", "llama")
    batch = make_batch(episodes(VOCABULARY))
    plain = {name: value for name, value in parameters.config.items() if name != "rope_scaling"}
    scaled, unscaled = (score(parameters.leaves, each, batch).logprobs for each in (parameters.config, plain))
    assert (scaled - unscaled).abs().max() > 1e-3


@pytest.mark.parametrize("family", list(MODELS))
def test_engine_scores_and_samples_as_the_trainer_scores(family: str, tmp_path: Path) -> None:
    directory, parameters = checkpoint(tmp_path / "policy", family)
    tokens = torch.randint(VOCABULARY, (4, 40), generator=torch.Generator().manual_seed(1))
    engine, _ = score_rows(read_weights(directory), tokens)
    assert k3(trainer_logprobs(parameters, list(tokens), 1), engine.flatten()) < 1e-9

    async def sample() -> list[tuple[list[int], list[float]]]:
        running = BuiltinEngine(directory, "v1", threads=1)
        try:
            asked = [running.generate([5, 6, 7 + row], SamplingParams(1.0, 24, seed=row)) for row in range(4)]
            found = await asyncio.gather(*asked)
        finally:
            await running.close()
        return [([5, 6, 7 + row, *each.token_ids], each.logprobs) for row, each in enumerate(found)]

    for ids, logprobs in asyncio.run(sample()):
        assert k3(trainer_logprobs(parameters, [torch.tensor(ids)], 3), torch.tensor(logprobs)) < 1e-9


def trainer_logprobs(parameters: Parameters, rows: list[Tensor], start: int) -> Tensor:
    sequences = [ScoredSequence(row.numpy(), np.arange(start, len(row))) for row in rows]
    with torch.no_grad():
        return score(parameters.leaves, parameters.config, make_batch(sequences)).logprobs


def k3(ours: Tensor, theirs: Tensor) -> float:
    difference = (ours - theirs).double()
    return float((difference.exp() - 1 - difference).mean())


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_exported_checkpoint_keeps_the_forward_pass(family: str, tmp_path: Path) -> None:
    directory, parameters = checkpoint(tmp_path / "policy", family)
    loaded, batch = load_checkpoint(directory), make_batch(episodes(VOCABULARY))
    first, second = (score(each.leaves, each.config, batch).logprobs for each in (parameters, loaded))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"family": "qwen3", "experts": 4}, "experts is set, but family qwen3 has no experts: use mlp_width"),
        ({"mlp_width": 256}, "mlp_width is set, but family qwen3_moe has experts: use expert_width"),
        ({"family": "llama", "mlp_width": 200}, "mlp_width = 200 is not a multiple of 128.*make it 256"),
        ({"family": "gpt2"}, "qwen3_moe"),
        ({"rope_llama3": {"high_freq_factor": 1.0}}, "high_freq_factor 1.0 must exceed low_freq_factor 1.0"),
    ],
)
def test_a_contradicting_shape_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        ModelConfig(**change)


def test_unset_fields_do_not_enter_action_keys() -> None:
    dumped = ModelConfig().model_dump()
    assert not {"family", "mlp_width", "rope_llama3"} & set(dumped)
    for model in MODELS.values():
        assert ModelConfig.model_validate(model.model_dump(mode="json")) == model


def test_a_checkpoint_of_another_family_is_refused(tmp_path: Path) -> None:
    directory, _ = checkpoint(tmp_path / "policy", "llama")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "qwen3"}))
    with pytest.raises(SchemaError, match=r"lacks tensor model\.layers\.0\.self_attn\.q_norm\.weight"):
        check_checkpoint(directory)
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "mistral"}))
    with pytest.raises(SchemaError, match=r"config\.json: model_type 'mistral' is not supported"):
        check_checkpoint(directory)
    with pytest.raises(EngineError, match="mistral model: the built-in engine runs qwen3_moe, qwen3, llama"):
        read_weights(directory)


DIVIDED = {"backend": "fsdp2", "ranks": 2, "expert_ranks": 2}


def test_settings_of_a_mixture_of_experts_are_refused_for_a_dense_model(world: World) -> None:
    job = world.sft_job(router_balance=0.1).model_copy(update={"model": MODELS["qwen3"]})
    said = "router_balance is 0.1, but the checkpoint is a dense qwen3 model without experts: leave it out"
    with pytest.raises(TrainingConfigError, match=said):
        run_job(job)
    for change in (
        {"base": {"model": {"family": "qwen3"}}, "trainer": {"router_balance": 0.1}},
        {"base": {"model": {"family": "llama"}, "sft": {"router_balance": 0.1}}},
        {"base": {"model": {"family": "llama"}}, "rollouts": {"record_routing": True}},
        {"base": {"model": {"family": "qwen3"}}, "trainer": {"launcher": DIVIDED}},
    ):
        with pytest.raises(ExperimentError, match=r"has no experts: leave it out"):
            parse_experiment({"name": "dense", **change})


def test_experts_that_ranks_cannot_divide_are_refused_before_anything_runs() -> None:
    for ranks, fault in ((2, "divide the model's 3 experts"), (3, "divide the 2 training processes")):
        launcher = {**DIVIDED, "expert_ranks": ranks}
        with pytest.raises(ExperimentError, match=f"expert_ranks {ranks} does not {fault}"):
            parse_experiment({"name": "e", "base": {"model": {"experts": 3}}, "trainer": {"launcher": launcher}})


def copy_dataset(world: World) -> Artifact:
    """Two groups of two episodes, one of each rewarded."""
    rows, members = [], []
    for index, (ids, roles) in enumerate(world_episodes(world, 4)):
        logprobs = [-1.0 if role == int(TokenRole.POLICY) else None for role in roles]
        names = {"episode_id": f"e{index}", "group_id": f"g{index // 2}", "reward": float(index % 2)}
        told = {"group_index": 0, "token_ids": ids, "token_role": roles, "logprobs": logprobs, "policy_versions": ["v"]}
        rows.append(names | told)
        members.append(names | {"kept": True})
    return world.dataset(rows, members)


def test_a_dense_model_learns_and_trains_on_a_dataset(world: World) -> None:
    job = world.sft_job(max_steps=4).model_copy(update={"model": MODELS["qwen3"]})
    base = run_job(job)
    dataset = copy_dataset(world)
    result = run_job(world.rl_job("dense", dataset, base.checkpoint, base.trainer_state))
    config = check_checkpoint(open_artifact(world.store, result.checkpoint).directory())
    assert config["model_type"] == "qwen3" and result.checkpoint.digest != base.checkpoint.digest
