"""Recipes of trainer.precision: what they round, what is exported, and that the built-in engine computes the same."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor
from trainer_world import TINY, World, episodes
from triplane_kernels.blockwise import fake_quantize_rows
from triplane_kernels.quantize_reference import dequantize_mx, dequantize_rows, quantize_activations, quantize_mx

import trainer.model
from contracts.artifacts import Artifact, open_artifact
from contracts.checkpoints import WEIGHTS, check_checkpoint
from contracts.errors import SchemaError
from contracts.precision import FORWARD, Forward, forward_of
from contracts.tensor_files import TensorFiles
from inference.engines.base import SamplingParams
from inference.engines.builtin import BuiltinEngine
from inference.engines.weights import read_weights
from trainer.config import RlConfig
from trainer.errors import TrainingConfigError
from trainer.export import checkpoint_tensors, load_checkpoint
from trainer.model import Batch, score
from trainer.parameters import Parameters, draw_masters
from trainer.precision import W8, precision_of, with_precision
from trainer.recipes.base import Recipe
from trainer.rl import train_rl
from trainer.sft import train_sft

K3_BOUND = 1e-9
"""k3 of trainer and built-in engine, nats a token, of every recipe on a CPU. Measured: below 1e-12."""
W8A8_BF16 = {"kind": "w8a8-1x128", "activations": "bfloat16", "router_dtype": "bfloat16"}
SETTINGS: dict[str, dict[str, Any]] = {
    "w8": {"kind": "w8"},
    "w8 narrow": {"kind": "w8", "head_dtype": "bfloat16", "router_dtype": "bfloat16"},
    "fp32": {"kind": "fp32"},
    "bf16": {"kind": "bf16"},
    "bf16 narrow": {"kind": "bf16", "head_dtype": "bfloat16"},
    "w8a8": {"kind": "w8a8-1x128"},
    "w8a8 bf16": W8A8_BF16,
}
VOCABULARY = 96


def config_of(setting: dict[str, Any], **shape: Any) -> dict[str, Any]:
    model = TINY.model_copy(update=shape)
    return with_precision(model.hf_config(VOCABULARY), RlConfig(precision=setting).precision)


def parameters_of(config: dict[str, Any], scale: float = 4.0) -> Parameters:
    """Fresh weights, large enough for sharp distributions; norms that are not 1."""
    random = torch.Generator().manual_seed(3)
    masters = {
        name: master * scale if master.dim() > 1 else master + 0.1 * torch.randn(master.shape, generator=random)
        for name, master in draw_masters(config, seed=0).items()
    }
    return Parameters.from_masters(config, masters)


def write(parameters: Parameters, directory: Path) -> Path:
    directory.mkdir()
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint_tensors(parameters).items()}
    save_file(tensors, directory / WEIGHTS, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(parameters.config))
    return directory


def batch_of(tokens: Tensor) -> Batch:
    count, length = tokens.shape
    rows = torch.cat([torch.arange(length - 1) + length * index for index in range(count)])
    flat = tokens.flatten()
    return Batch(flat, rows, flat[rows + 1], rows // length, [length] * count)


def trainer_logprobs(parameters: Parameters, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return score(parameters.leaves, parameters.config, batch_of(tokens)).logprobs


def engine_logprobs(directory: Path, tokens: Tensor) -> Tensor:
    async def scored() -> list[list[float]]:
        engine = BuiltinEngine(directory, "v", threads=1)
        try:
            return await asyncio.gather(*(engine.score(row) for row in tokens.tolist()))
        finally:
            await engine.close()

    return torch.tensor(asyncio.run(scored()))[:, 1:].flatten()


def k3(ours: Tensor, theirs: Tensor) -> float:
    gap = (ours - theirs).double()
    return float((gap.exp() - gap - 1).mean())


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (6, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", SETTINGS)
def test_builtin_engine_computes_what_the_trainer_does(name: str, tokens: Tensor, tmp_path: Path) -> None:
    parameters = parameters_of(config_of(SETTINGS[name]))
    directory = write(parameters, tmp_path / "policy")
    ours, theirs = trainer_logprobs(parameters, tokens), engine_logprobs(directory, tokens)
    assert ours.std() > 0.5, "the distributions are sharp enough to show differences"
    assert k3(ours, theirs) < K3_BOUND


@pytest.mark.parametrize("name", ["bf16", "w8a8", "w8a8 bf16", "w8 narrow"])
def test_recipe_changes_the_forward_pass_and_an_engine_without_it_is_far(
    name: str, tokens: Tensor, tmp_path: Path
) -> None:
    parameters = parameters_of(config_of(SETTINGS[name]))
    directory = write(parameters, tmp_path / "policy")
    config = dict(parameters.config)
    del config[FORWARD]
    config["torch_dtype"] = "float32"
    tensors = {key: value.float() for key, value in checkpoint_tensors(parameters).items()}
    if "quantization_config" in config:
        tensors |= {key: value for key, value in checkpoint_tensors(parameters).items() if value.dtype.itemsize == 1}
    save_file({key: value.contiguous() for key, value in tensors.items()}, directory / WEIGHTS, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    gap = k3(trainer_logprobs(parameters, tokens), engine_logprobs(directory, tokens))
    assert gap > 100 * K3_BOUND, "an engine that ignores the recipe must be seen"


@pytest.mark.parametrize("name", SETTINGS)
def test_exported_checkpoint_loads_as_the_same_leaves(name: str, tmp_path: Path) -> None:
    parameters = parameters_of(config_of(SETTINGS[name]))
    directory = write(parameters, tmp_path / "policy")
    check_checkpoint(directory)
    loaded = load_checkpoint(directory)
    for leaf, leaf_name in zip(loaded.leaves.values(), loaded.leaves, strict=True):
        assert torch.equal(leaf, parameters.leaves[leaf_name]), leaf_name
    forms = {form for form, _ in TensorFiles(directory, WEIGHTS).forms.values()}
    plain = "BF16" if forward_of(parameters.config).activations == "bfloat16" else "F32"
    assert forms == ({"F8_E4M3", "F32", plain} if "w8" in name else {plain})


class TransformerEngineOnCpu(Recipe):
    """What TransformerEngine's recipes compute forward, by the kernels' references."""

    def operand(self, rows: Tensor) -> Tensor:
        if self.forward.recipe == "mxfp8":
            return self.wide(dequantize_mx(*quantize_mx(rows.float(), None), torch.float32))
        codes, scales = quantize_activations(rows.float(), True, None)
        return self.wide(dequantize_rows(codes, scales, torch.float32))

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        return super().linear(rows, self.weight(weight))

    def grouped(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return super().grouped(rows, torch.stack([self.weight(weight) for weight in weights]), ends)

    def weight(self, weight: Tensor) -> Tensor:
        found = dequantize_mx(*quantize_mx(weight, None), torch.float32) if self.forward.recipe == "mxfp8" else weight
        assert torch.equal(weight, weight.to(torch.bfloat16).float()), "TransformerEngine reads bfloat16"
        return found


@pytest.mark.parametrize("kind", ["te-float8-block", "te-mxfp8"])
def test_builtin_engine_serves_the_recipes_of_transformer_engine(
    kind: str, tokens: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = parameters_of(config_of({"kind": kind}))
    directory = write(parameters, tmp_path / "policy")
    recipe = TransformerEngineOnCpu(forward_of(parameters.config))
    monkeypatch.setattr(trainer.model, "recipe_of", lambda config: recipe)
    ours, theirs = trainer_logprobs(parameters, tokens), engine_logprobs(directory, tokens)
    assert ours.std() > 0.5 and k3(ours, theirs) < K3_BOUND


def test_leaves_are_rounded_and_masters_are_not() -> None:
    parameters = parameters_of(config_of({"kind": "bf16"}))
    for name, master in parameters.masters():
        leaf = parameters.leaves[name]
        assert leaf.dtype == torch.float32 and torch.equal(leaf, leaf.to(torch.bfloat16).float())
        assert torch.equal(leaf, master.to(torch.bfloat16).float())
    assert any(not torch.equal(master, parameters.leaves[name]) for name, master in parameters.masters())


@pytest.mark.parametrize("name", ["fp32", "bf16", "w8a8", "w8a8 bf16", "w8 narrow"])
def test_gradients_agree_with_those_of_plain_products(name: str, tokens: Tensor) -> None:
    """Straight through every rounding: close to the gradient of unrounded products of the same leaves, not equal."""
    rounded = parameters_of(config_of(SETTINGS[name]))
    plain = Parameters.from_masters(config_of({"kind": "fp32"}), {n: t.detach() for n, t in rounded.leaves.items()})
    found = []
    for parameters in (rounded, plain):
        parameters.clear_gradients()
        (-score(parameters.leaves, parameters.config, batch_of(tokens)).logprobs.mean()).backward()  # type: ignore[no-untyped-call]
        found.append({name: leaf.grad for name, leaf in parameters.leaves.items()})
    for leaf_name, gradient in found[0].items():
        assert gradient is not None and gradient.dtype == torch.float32
        cosine = torch.cosine_similarity(gradient.flatten(), found[1][leaf_name].flatten(), dim=0)
        # a token that rounding sends to another expert turns a router's gradient further
        assert cosine > (0.9 if leaf_name.endswith("mlp.gate.weight") else 0.95), leaf_name


def test_rows_are_quantized_as_vllm_does() -> None:
    """Against the formula of `per_token_group_quant_fp8`, one block at a time."""
    rows = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 10
    rows[1, :128] = 0.0
    rows[2, 128:256] = 1e-13
    expected = torch.zeros_like(rows)
    for row in range(len(rows)):
        for start in range(0, 300, 128):
            block = rows[row, start : start + 128]
            scale = torch.maximum(block.abs().max(), torch.tensor(1e-10)) / torch.tensor(448.0)
            codes = (block / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            expected[row, start : start + 128] = codes.float() * scale
    assert torch.equal(fake_quantize_rows(rows), expected)
    assert fake_quantize_rows(torch.full((1, 4), torch.nan)).isnan().all()


def test_quantized_rows_pass_the_gradient_through() -> None:
    rows = torch.randn(3, 130, requires_grad=True)
    gradient = torch.randn(3, 130)
    fake_quantize_rows(rows).backward(gradient)  # type: ignore[no-untyped-call]
    assert rows.grad is not None and torch.equal(rows.grad, gradient)


def test_sampling_by_a_rounding_recipe_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    directory = write(parameters_of(config_of(W8A8_BF16)), tmp_path / "policy")

    async def sampled(together: bool) -> list[list[float]]:
        engine = BuiltinEngine(directory, "v", threads=1)
        prompts = [list(range(2, 4 + index)) for index in range(9)]
        params = [SamplingParams(1.0, 6, seed) for seed in range(9)]
        try:
            if together:
                done = await asyncio.gather(*(engine.generate(p, q) for p, q in zip(prompts, params, strict=True)))
            else:
                done = [await engine.generate(p, q) for p, q in zip(prompts, params, strict=True)]
            return [[*map(float, each.token_ids), *each.logprobs] for each in done]
        finally:
            await engine.close()

    assert asyncio.run(sampled(True)) == asyncio.run(sampled(False))


def test_default_leaves_keys_and_config_as_they_are() -> None:
    config = TINY.hf_config(VOCABULARY)
    assert with_precision(config, W8()) == config and FORWARD not in config
    assert "precision" not in RlConfig().model_dump(mode="json")
    assert RlConfig(precision={"kind": "w8"}) == RlConfig(precision={}) == RlConfig()
    assert RlConfig(precision={"kind": "bf16"}).model_dump(mode="json")["precision"]["router_dtype"] == "bfloat16"
    assert RlConfig(precision={"kind": "w8", "head_dtype": "bfloat16"}).model_dump(mode="json")["precision"]


def test_setting_is_read_back_from_the_config() -> None:
    for setting in SETTINGS.values():
        precision = RlConfig(precision=setting).precision
        assert precision_of(config_of(setting)) == precision
        assert Forward(**config_of(setting).get(FORWARD, {})) == precision.forward


def test_unknown_recipe_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="nvfp4"):
        RlConfig(precision={"kind": "nvfp4"})
    directory = write(parameters_of(config_of({"kind": "bf16"})), tmp_path / "policy")
    config = json.loads((directory / "config.json").read_text())
    config[FORWARD]["recipe"] = "nvfp4"
    (directory / "config.json").write_text(json.dumps(config))
    for read in (read_weights, load_checkpoint):
        with pytest.raises(SchemaError, match="nvfp4"):
            read(directory)


def trained(world: World, setting: dict[str, Any], rl_setting: dict[str, Any]) -> tuple[Artifact, Artifact]:
    """(base, next) checkpoints of a warm start and one iteration on rows that the engine scored."""
    job = world.sft_job("sft", max_steps=1, evaluate_every=1).model_copy(
        update={"precision": RlConfig(precision=setting).precision}
    )
    base = train_sft(job, world.store)
    assert base is not None
    checkpoint = open_artifact(world.store, base.checkpoint)
    rows, members = [], []
    for index, (ids, roles) in enumerate(episodes(world, 8)):
        scored = engine_logprobs(checkpoint.directory(), torch.tensor([ids]))
        logprobs = [None, *scored.tolist()]
        kept = [value if role == 1 else None for value, role in zip(logprobs, roles, strict=True)]
        row = {"episode_id": f"e{index}", "group_id": f"g{index // 4}", "reward": float(index % 2)}
        versions = [checkpoint.ref.digest if role == 1 else None for role in roles]
        rows.append(
            {
                **row,
                "group_index": 0,
                "token_ids": ids,
                "token_role": roles,
                "logprobs": kept,
                "policy_versions": versions,
            }
        )
        members.append({**row, "kept": True})
    rl = world.rl_job("rl", world.dataset(rows, members), base.checkpoint, base.trainer_state, precision=rl_setting)
    found = train_rl(rl, world.store)
    assert found is not None
    return checkpoint, open_artifact(world.store, found.checkpoint)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(SETTINGS["fp32"], id="fp32", marks=pytest.mark.slow),
        pytest.param(SETTINGS["bf16"], id="bf16"),
        pytest.param(W8A8_BF16, id="w8a8", marks=pytest.mark.slow),
    ],
)
def test_iteration_trains_and_serves_by_its_recipe(world: World, setting: dict[str, Any], tokens: Tensor) -> None:
    base, after = trained(world, setting, setting)
    for checkpoint in (base, after):
        meta = checkpoint.meta
        forward = forward_of(json.loads(checkpoint.path("config.json").read_text()))
        assert (meta["recipe"], meta["forward_recipe"]) == (setting["kind"], forward.recipe)
        assert (meta["head_dtype"], meta["router_dtype"]) == (forward.head_dtype, forward.router_dtype)
    first = json.loads(after.path("metrics.jsonl").read_text().splitlines()[0])
    assert first["mismatch_k3"] < K3_BOUND, "the trainer's old logprobs are the engine's"
    parameters = load_checkpoint(after.directory())
    assert k3(trainer_logprobs(parameters, tokens), engine_logprobs(after.directory(), tokens)) < K3_BOUND


def test_iteration_refuses_a_checkpoint_of_another_recipe(world: World) -> None:
    with pytest.raises(TrainingConfigError, match=r"trainer\.precision is .*bf16.*w8"):
        trained(world, {"kind": "w8"}, {"kind": "bf16"})
