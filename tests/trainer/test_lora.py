"""LoRA: the base stays bit for bit, the adapter trains, continues, is exported in PEFT's format and served merged."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_model_families import checkpoint, copy_dataset, k3, trainer_logprobs, transformers_model
from test_trainer_against_transformers import episodes, hf_logprobs
from torch import Tensor
from trainer_world import World

from contracts.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, FOLDER, Adapter, factor_names, read_adapter
from contracts.artifacts import Artifact, ArtifactWriter, open_artifact
from contracts.checkpoints import WEIGHTS, check_checkpoint
from contracts.errors import SchemaError
from inference.engines.config import VllmConfig
from inference.engines.policies import PolicyDirectory, Preparer
from inference.engines.probes import score_rows
from inference.engines.weights import read_weights
from inference.errors import EngineError
from trainer.adapters import AdaptedParameters, adapt, draw_factors
from trainer.config import LoraConfig, RlConfig, parse_job
from trainer.data import make_batch
from trainer.errors import TrainingConfigError, TrainingDataError
from trainer.model import score
from trainer.parameters import Parameters
from trainer.result import TrainResult
from trainer.resume import open_parameters
from trainer.run import run_job

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LORA = {"rank": 4, "alpha": 8.0, "targets": ALL}


def adapted(base: Parameters, scale: float = 0.02) -> AdaptedParameters:
    """An adapter whose factors are all different from zero."""
    adapter = LoraConfig(**LORA).adapter
    factors = draw_factors(base.config, adapter, 0)
    generator = torch.Generator().manual_seed(1)
    noise = {name: torch.empty_like(each).normal_(0.0, scale, generator=generator) for name, each in factors.items()}
    return adapt(base, adapter, {name: factors[name] + noise[name] for name in factors})


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3"])
def test_gradients_of_adapters_equal_a_float64_reference(family: str, tmp_path: Path) -> None:
    _, base = checkpoint(tmp_path / "policy", family)
    parameters, sequences = adapted(base), episodes(90)
    score(parameters.leaves, parameters.config, make_batch(sequences)).logprobs.mean().backward()

    model = transformers_model(base, tmp_path / "plain").double()
    factors = {name: each.double().requires_grad_() for name, each in parameters.masters()}
    merged = {name: tensor.detach() for name, tensor in model.named_parameters()}
    for name in base.leaves:
        first, second = factor_names(name)
        if first in factors:
            added = 2.0 * (factors[second] @ factors[first])
            _add(merged, name, added)
    logprobs = torch.cat([reference_logprobs(model, merged, sequence) for sequence in sequences])
    logprobs.mean().backward()
    buffer = parameters.buffers[0]
    for name, factor in factors.items():
        torch.testing.assert_close(
            buffer.view(buffer.gradient, name).double(), factor.grad, atol=1e-6, rtol=1e-6, msg=name
        )
    assert all(not leaf.grad.any() for leaf in base.leaves.values() if leaf.grad is not None)


def _add(merged: dict[str, Tensor], name: str, added: Tensor) -> None:
    """transformers stacks gate and up of all experts in one parameter, without `.weight`."""
    if ".experts." not in name:
        merged[name] = merged[name] + added
        return
    width = added.shape[1]
    stacked = name.replace("gate_proj.weight", "gate_up_proj").replace("up_proj.weight", "gate_up_proj")
    stacked = stacked.removesuffix(".weight")
    whole = merged[stacked]
    if not stacked.endswith("gate_up_proj"):
        merged[stacked] = whole + added
        return
    halves = [whole[:, :width], whole[:, width:]]
    halves["up_proj" in name.rsplit(".", 2)[1]] = halves["up_proj" in name.rsplit(".", 2)[1]] + added
    merged[stacked] = torch.cat(halves, 1)


def reference_logprobs(model: Any, weights: dict[str, Tensor], sequence: Any) -> Tensor:
    def run(ids: Tensor) -> Any:
        return torch.func.functional_call(model, weights, (ids,))

    return hf_logprobs(run, sequence)


@pytest.fixture
def base(world: World) -> TrainResult:
    found = run_job(world.sft_job(max_steps=2))
    assert found is not None
    return found


def iterate(world: World, name: str, start: TrainResult, **config: Any) -> TrainResult:
    job = world.rl_job(name, copy_dataset(world), start.checkpoint, start.trainer_state, **config)
    found = run_job(job)
    assert found is not None
    return found


def opened(world: World, result: TrainResult) -> Artifact:
    return open_artifact(world.store, result.checkpoint)


def test_base_stays_bit_for_bit_and_later_iterations_continue_the_adapter(world: World, base: TrainResult) -> None:
    first = iterate(world, "one", base, lora=LORA)
    second = iterate(world, "two", first, lora=LORA)
    before = opened(world, base)
    weights = [opened(world, each).path(WEIGHTS).read_bytes() for each in (base, first, second)]
    assert weights[0] == weights[1] == weights[2]
    assert check_checkpoint(opened(world, second).directory()) == check_checkpoint(before.directory())

    folders = [opened(world, each).directory() / FOLDER for each in (first, second)]
    one, two = (load_file(folder / ADAPTER_WEIGHTS) for folder in folders)
    moved = {name for name in one if ".lora_B." in name and not torch.equal(one[name], two[name])}
    assert moved >= {name for name in one if ".lora_B." in name and ".experts." not in name}
    assert any(".experts." in name for name in moved)
    steps = [
        load_file(open_artifact(world.store, each.trainer_state).path("state.safetensors")) for each in (first, second)
    ]
    assert [int(each["adamw.step"]) for each in steps] == [2, 4]
    assert not any("lora" not in name for name in steps[1] if name.startswith("master."))


def test_served_policy_is_the_trained_one(world: World, base: TrainResult) -> None:
    result = iterate(world, "one", base, lora=LORA, learning_rate=0.02)
    begin, saved = opened(world, result), open_artifact(world.store, result.trainer_state)
    parameters, _ = open_parameters(begin, saved, LoraConfig(**LORA).adapter, 0)
    tokens = torch.randint(world.vocabulary, (4, 40), generator=torch.Generator().manual_seed(1))
    served, _ = score_rows(read_weights(begin.directory()), tokens)
    assert k3(trainer_logprobs(parameters, list(tokens), 1), served.flatten()) < 1e-9
    assert isinstance(parameters, AdaptedParameters)
    plain = trainer_logprobs(parameters.base, list(tokens), 1)
    assert (plain - served.flatten()).abs().max() > 1e-3


def test_files_are_those_of_peft(world: World, base: TrainResult) -> None:
    result = iterate(world, "one", base, lora=LORA | {"targets": ("v_proj", "gate_proj")})
    folder = opened(world, result).directory() / FOLDER
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    assert config["target_modules"] == ["v_proj", "gate_proj"]
    shapes = {name: tuple(each.shape) for name, each in load_file(folder / ADAPTER_WEIGHTS).items()}
    layer = "base_model.model.model.layers.1"
    assert shapes[f"{layer}.self_attn.v_proj.lora_A.weight"] == (4, 128)
    assert shapes[f"{layer}.mlp.experts.3.gate_proj.lora_B.weight"] == (128, 4)
    assert len(shapes) == 2 * 2 * (1 + 4)
    assert opened(world, result).meta["adapter"] == {"rank": 4, "alpha": 8.0, "targets": ["v_proj", "gate_proj"]}


def test_zero_learning_rate_serves_the_base(world: World, base: TrainResult) -> None:
    result = iterate(world, "one", base, lora=LORA, learning_rate=0.0)
    tokens = torch.arange(30)[None]
    served, before = (score_rows(read_weights(opened(world, each).directory()), tokens)[0] for each in (result, base))
    assert torch.equal(served, before)


@pytest.mark.parametrize("lora", [None, LORA | {"rank": 8}, LORA | {"targets": ("q_proj",)}])
def test_another_adapter_is_refused(world: World, base: TrainResult, lora: dict[str, Any] | None) -> None:
    first = iterate(world, "one", base, lora=LORA)
    with pytest.raises(
        TrainingConfigError, match=r"has an adapter of rank 4, alpha 8, targets q_proj.*: set trainer\.lora"
    ):
        iterate(world, "two", first, lora=lora)


def test_state_of_another_adapter_is_refused(world: World, base: TrainResult) -> None:
    first, other = (
        iterate(world, name, base, lora=LORA, learning_rate=rate) for name, rate in (("a", 0.1), ("b", 0.2))
    )
    mixed = TrainResult(first.checkpoint, other.trainer_state, {})
    with pytest.raises(TrainingDataError, match="does not hold the adapter of checkpoint"):
        iterate(world, "two", mixed, lora=LORA)


def test_adapter_of_another_base_is_refused(world: World, base: TrainResult, tmp_path: Path) -> None:
    source = opened(world, iterate(world, "one", base, lora=LORA)).directory() / FOLDER
    directory, other = checkpoint(tmp_path / "policy", "qwen3")
    (directory / FOLDER).mkdir()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        (directory / FOLDER / name).write_bytes((source / name).read_bytes())
    with pytest.raises(SchemaError, match=r"tensor base_model.* is .*expected .*belongs to another base or rank"):
        read_weights(directory)
    body = json.loads((source / ADAPTER_CONFIG).read_text())
    (directory / FOLDER / ADAPTER_CONFIG).write_text(json.dumps(body | {"target_modules": ["lm_head"]}))
    with pytest.raises(SchemaError, match=r"target_modules \['lm_head'\] are not supported"):
        read_adapter(directory, other.config)


def test_vllm_in_fp8_refuses_an_adapter_that_it_would_not_serve(world: World, base: TrainResult) -> None:
    directory = opened(world, iterate(world, "one", base, lora=LORA)).directory()
    preparer = Preparer(VllmConfig(kind="vllm", base_url="http://127.0.0.1:9", weights="fp8"))
    with pytest.raises(EngineError, match=r"has a LoRA adapter.*set engine\.weights: dequantized"):
        asyncio.run(preparer.prepared(PolicyDirectory(directory, "v"), plain=False))


def test_unset_adapters_do_not_enter_action_keys() -> None:
    assert "lora" not in RlConfig().model_dump()
    assert RlConfig(lora=LoraConfig(**LORA)).model_dump()["lora"]["rank"] == 4
    assert LoraConfig(targets=("v_proj", "q_proj")).adapter == Adapter(16, 32.0, ("q_proj", "v_proj"))


def test_supervised_training_of_an_adapter_resumes_and_leaves_the_base(world: World, base: TrainResult) -> None:
    start = {"checkpoint": base.checkpoint, "trainer_state": base.trainer_state, "lora": LoraConfig(**LORA)}

    def tune(name: str, **config: Any) -> TrainResult:
        job = world.sft_job(name, max_steps=4, snapshot_every=2, **config).model_copy(update=start)
        found = run_job(job)
        assert found is not None
        return found

    whole = tune("tuned")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer.sft._Run.evaluate", stop_at_the_third_look())
        with pytest.raises(TrainingDataError, match="stopped by the test"):
            tune("again", evaluate_every=1)
    resumed = tune("again", evaluate_every=1)
    weights = [opened(world, each).path(WEIGHTS).read_bytes() for each in (base, whole)]
    assert weights[0] == weights[1]
    ours, theirs = (load_file(opened(world, each).directory() / FOLDER / ADAPTER_WEIGHTS) for each in (whole, resumed))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(ours[name].any() for name in ours if ".experts." not in name)  # an expert may get no token
    assert any(ours[name].any() for name in ours if ".experts." in name and ".lora_B." in name)
    continued = iterate(world, "one", whole, lora=LORA)
    assert opened(world, continued).path(WEIGHTS).read_bytes() == weights[0]


def stop_at_the_third_look() -> Any:
    seen: list[int] = []

    def evaluate(run: Any, validation: Any) -> None:
        seen.append(run.taken)
        if len(seen) == 3:
            raise TrainingDataError("stopped by the test")

    return evaluate


def test_adapters_of_a_fresh_model_are_refused(world: World) -> None:
    job = world.sft_job().model_dump(mode="json") | {"lora": LORA}
    with pytest.raises(TrainingConfigError, match=r"lora needs weights to adapt: pass checkpoint and tr"):
        parse_job(json.dumps(job))


def test_a_start_with_another_tokenizer_is_refused(world: World, base: TrainResult) -> None:
    other = json.loads(world.tokenizer.path("tokenizer.json").read_text()) | {"truncation": None, "version": "1.0"}
    with ArtifactWriter(world.store, "tokenizer", "0" * 64, parents={}, config={}, code_version="1") as out:
        out.add_bytes("tokenizer.json", json.dumps(other).encode())
        found = out.commit()
    change = {"checkpoint": base.checkpoint, "trainer_state": base.trainer_state, "tokenizer": found.ref}
    with pytest.raises(TrainingConfigError, match=r"is not the tokenizer of checkpoint .*the checkpoint's own"):
        run_job(world.sft_job("other").model_copy(update=change))
