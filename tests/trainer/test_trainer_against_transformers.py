"""The trainer's forward, its gradients and its exported checkpoint against plain `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from trainer_world import TINY, World

from contracts.artifacts import open_artifact
from contracts.chat import ChatTokenizer
from contracts.checkpoints import WEIGHTS, check_checkpoint
from contracts.precision import Forward
from contracts.store import open_store
from trainer.data import ScoredSequence, make_batch
from trainer.export import checkpoint_tensors
from trainer.import_hf import import_checkpoint
from trainer.model import _norm, _rotary, _rotate, score
from trainer.model_config import ModelConfig
from trainer.parameters import Parameters, draw_masters
from trainer.recipes.bf16 import Bf16Recipe
from trainer.run import run_job

transformers = pytest.importorskip("transformers")


def dequantized(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Independent of the trainer: code times the scale of its 128x128 block."""
    plain = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        if tensor.dtype == torch.float8_e4m3fn:
            scale = tensors[name + "_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            tensor = tensor.float() * scale[: tensor.shape[0], : tensor.shape[1]]
        plain[name] = tensor
    return plain


def hf_model(config: dict[str, Any], plain: dict[str, Tensor], folder: Path) -> Any:
    from safetensors.torch import save_file

    body = {name: value for name, value in config.items() if name != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(body))
    save_file(
        {name: tensor.contiguous() for name, tensor in plain.items()}, folder / WEIGHTS, metadata={"format": "pt"}
    )
    model, info = transformers.Qwen3MoeForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    assert not info["unexpected_keys"] and set(info["missing_keys"]) <= {"lm_head.weight"}
    return model


def episodes(vocabulary: int) -> list[ScoredSequence]:
    draw = torch.Generator().manual_seed(3)
    return [
        ScoredSequence(torch.randint(0, vocabulary, (length,), generator=draw).numpy(), torch.arange(2, length).numpy())
        for length in (9, 14, 5)
    ]


@pytest.mark.parametrize("change", [{}, {"tie_word_embeddings": False, "hidden_size": 256, "rope_theta": 1e6}])
def test_forward_and_gradients_equal_transformers(change: dict[str, Any], tmp_path: Path) -> None:
    config = ModelConfig(**(TINY.model_dump() | {"initializer_range": 0.2} | change)).hf_config(90)
    parameters = Parameters.from_masters(config, draw_masters(config, 0))
    model = hf_model(config, dequantized(checkpoint_tensors(parameters)), tmp_path)
    sequences = episodes(90)
    ours = score(parameters.leaves, config, make_batch(sequences)).logprobs
    theirs = torch.cat([hf_logprobs(model, sequence) for sequence in sequences])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    ours.mean().backward()
    theirs.mean().backward()
    reference = {name: tensor.grad for name, tensor in model.named_parameters()}
    for name in (
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.1.self_attn.k_proj.weight",
    ):
        torch.testing.assert_close(parameters.leaves[name].grad, reference[name], atol=1e-5, rtol=1e-4)
    down = parameters.leaves["model.layers.0.mlp.experts.down_proj.weight"].grad
    torch.testing.assert_close(down, reference["model.layers.0.mlp.experts.down_proj"], atol=1e-5, rtol=1e-4)


def test_bfloat16_norms_and_rotated_heads_equal_transformers() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, apply_rotary_pos_emb

    recipe = Bf16Recipe(Forward("bf16", activations="bfloat16"))
    config = TINY.hf_config(90)
    draw = torch.Generator().manual_seed(3)
    heads = (2 * torch.randn(50, 4, config["head_dim"], generator=draw)).bfloat16()
    norm = Qwen3MoeRMSNorm(config["head_dim"], 1e-6).bfloat16()
    weight = (1 + 0.2 * torch.randn(config["head_dim"], generator=draw)).bfloat16()
    norm.weight.data.copy_(weight)
    rotary = _rotary([50], config, torch.device("cpu"))
    cosine, sine = (part[None, :, 0].bfloat16() for part in rotary)
    normed = norm(heads)
    turned = apply_rotary_pos_emb(*[normed.transpose(0, 1)[None]] * 2, cosine, sine)[0][0].transpose(0, 1)
    # sums in float64 move few values to the next number
    assert float((_norm(recipe, heads, weight.float(), 1e-6) != normed).double().mean()) < 2e-3
    assert float((_rotate(recipe, heads, weight.float(), 1e-6, rotary) != turned).double().mean()) < 2e-3


def hf_logprobs(model: Any, sequence: ScoredSequence) -> Tensor:
    ids = torch.from_numpy(sequence.token_ids)[None]
    every = model(ids).logits[0].log_softmax(-1)
    return torch.stack([every[position - 1, ids[0, position]] for position in sequence.scored.tolist()])


def test_exported_checkpoint_loads_into_transformers_with_the_same_logits(world: World, tmp_path: Path) -> None:
    result = run_job(world.sft_job())
    directory = open_artifact(open_store(world.store.url), result.checkpoint).directory()
    config = check_checkpoint(directory)
    assert config["architectures"] == ["Qwen3MoeForCausalLM"] and config["tie_word_embeddings"] is True
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == config["eos_token_id"]
    model = hf_model(config, dequantized(load_file(directory / WEIGHTS)), tmp_path)
    from trainer.export import load_checkpoint

    parameters, sequences = load_checkpoint(directory), episodes(world.vocabulary)
    ours = score(parameters.leaves, config, make_batch(sequences)).logprobs
    theirs = torch.cat([hf_logprobs(model, sequence) for sequence in sequences])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_imported_directory_keeps_its_weights_up_to_fp8(world: World, tmp_path: Path, dtype: torch.dtype) -> None:
    vocabulary = ChatTokenizer.from_directory(world.tokenizer.directory()).vocabulary_size
    config = TINY.hf_config(vocabulary)
    body = {name: value for name, value in config.items() if name not in ("quantization_config", "torch_dtype")}
    torch.manual_seed(0)
    original = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**body)).to(dtype)
    original.save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes(world.tokenizer.path(name).read_bytes())
    checkpoint = import_checkpoint(tmp_path, world.store)
    assert import_checkpoint(tmp_path, world.store).ref == checkpoint.ref
    masters = load_file(_state_path(world, checkpoint.ref.key))
    weight = original.model.layers[1].self_attn.q_proj.weight.float()
    assert torch.equal(masters["master.model.layers.1.self_attn.q_proj.weight"], weight)
    stored = dequantized(load_file(checkpoint.path(WEIGHTS)))["model.layers.1.self_attn.q_proj.weight"]
    assert (stored - weight).norm() / weight.norm() < 0.04


def _state_path(world: World, key: str) -> Path:
    from contracts.artifacts import find_artifact

    found = find_artifact(world.store, "trainer_state", key)
    assert found is not None
    return found.path("state.safetensors")
