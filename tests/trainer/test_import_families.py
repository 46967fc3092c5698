"""Import of Hugging Face directories of every family, in bfloat16 and in FP8 blocks, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model_families import MODELS
from test_trainer_against_transformers import dequantized, episodes, hf_logprobs
from test_trainer_rl import own_dataset
from trainer_world import World

from contracts.artifacts import Artifact, find_artifact, open_artifact
from contracts.checkpoints import WEIGHTS
from ops.fp8_health import MAX_SCALE_RATIO, code_facts, code_faults
from trainer.data import make_batch
from trainer.errors import TrainingConfigError, TrainingDataError
from trainer.export import TOKENIZER_FILES, load_checkpoint
from trainer.import_hf import import_checkpoint
from trainer.model import score
from trainer.result import TrainResult
from trainer.resume import resume_parameters
from trainer.run import run_job
from trainer.state import load_state

transformers = pytest.importorskip("transformers")
FAMILIES = list(MODELS)


def original(world: World, folder: Path, family: str, seed: int = 0, **change: Any) -> Any:
    """A directory that transformers wrote, in bfloat16, with the world's tokenizer."""
    body = MODELS[family].hf_config(world.vocabulary)
    body = {name: value for name, value in body.items() if name not in ("quantization_config", "torch_dtype")}
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**(body | change))
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        (folder / name).write_bytes(world.tokenizer.path(name).read_bytes())
    return model


def fp8(folder: Path, *, power_of_two: bool = False) -> dict[str, torch.Tensor]:
    """Turn a directory's projections into FP8 blocks with bfloat16 scales, as Qwen's FP8 releases have them."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        rows, columns = tensor.shape
        blocks = tensor.float().view(rows // 128, 128, columns // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        scale = scale.log2().ceil().exp2() if power_of_two else scale.to(torch.bfloat16).float()
        codes = (blocks / scale[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[name] = codes.view(rows, columns)
        tensors[f"{name}_scale_inv"] = scale.to(torch.bfloat16)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    edit(folder, quantization_config={"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]})
    return tensors


def edit(folder: Path, **change: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))


def state_of(world: World, checkpoint: Artifact) -> Artifact:
    found = find_artifact(world.store, "trainer_state", checkpoint.ref.key)
    assert found is not None
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_original_becomes_a_checkpoint_that_transformers_loads(
    world: World, tmp_path: Path, family: str
) -> None:
    model = original(world, tmp_path / "hf", family)
    checkpoint = import_checkpoint(tmp_path / "hf", world.store)
    assert import_checkpoint(tmp_path / "hf", world.store).ref == checkpoint.ref
    masters = load_file(state_of(world, checkpoint).path("state.safetensors"))
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(masters[f"master.{name}"], model.state_dict()[name].float())

    config = json.loads(checkpoint.path("config.json").read_text())
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "config.json").write_text(json.dumps(plain))
    tensors = {name: each.contiguous() for name, each in dequantized(load_file(checkpoint.path(WEIGHTS))).items()}
    save_file(tensors, tmp_path / "back" / WEIGHTS, {"format": "pt"})
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    assert type(back) is type(model)
    parameters, sequences = load_checkpoint(checkpoint.directory()), episodes(world.vocabulary)
    ours = score(parameters.leaves, config, make_batch(sequences)).logprobs
    theirs = torch.cat([hf_logprobs(back, sequence) for sequence in sequences])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_fp8_original_keeps_its_codes_and_scales(world: World, tmp_path: Path, family: str, power_of_two: bool) -> None:
    original(world, tmp_path / "hf", family)
    given = fp8(tmp_path / "hf", power_of_two=power_of_two)
    checkpoint = import_checkpoint(tmp_path / "hf", world.store)
    stored = load_file(checkpoint.path(WEIGHTS))
    coded = [name for name, tensor in given.items() if tensor.dtype == torch.float8_e4m3fn]
    assert coded
    for name in coded:
        assert torch.equal(stored[name].view(torch.uint8), given[name].view(torch.uint8)), name
        assert torch.equal(stored[f"{name}_scale_inv"], given[f"{name}_scale_inv"].float()), name

    loaded, saved = load_checkpoint(checkpoint.directory()), state_of(world, checkpoint)
    resumed = resume_parameters(loaded, load_state(saved, loaded.config), checkpoint.ref, saved.ref)
    for name, leaf in loaded.leaves.items():
        assert torch.equal(resumed.leaves[name], leaf), name


@pytest.fixture
def power_of_two(world: World, tmp_path: Path) -> TrainResult:
    """An imported FP8 original whose scales are up to twice the largest value over 448."""
    original(world, tmp_path / "hf", "qwen3")
    tensors = load_file(tmp_path / "hf" / WEIGHTS)
    for layer, name in enumerate(name for name in tensors if name.endswith("_proj.weight")):
        tensors[name] *= 1.07**layer
    save_file(tensors, tmp_path / "hf" / WEIGHTS, {"format": "pt"})
    fp8(tmp_path / "hf", power_of_two=True)
    checkpoint = import_checkpoint(tmp_path / "hf", world.store)
    return TrainResult(checkpoint.ref, state_of(world, checkpoint).ref, {})


def test_first_candidate_of_an_fp8_original_is_not_refused_for_its_scales(
    world: World, power_of_two: TrainResult
) -> None:
    refs = power_of_two.checkpoint, power_of_two.trainer_state
    trained = run_job(world.rl_job("one", own_dataset(world, power_of_two), *refs, learning_rate=1e-6))
    assert trained is not None
    parent, candidate = (open_artifact(world.store, each.checkpoint) for each in (power_of_two, trained))
    before, after = (load_file(each.path(WEIGHTS)) for each in (parent, candidate))
    ratios = [float((after[name] / before[name]).median()) for name in after if name.endswith("_scale_inv")]
    assert min(ratios) < 1 / MAX_SCALE_RATIO, "the first step quantized them again"
    facts = code_facts(candidate, parent)
    assert facts is not None and list(code_faults(facts)) == []


def test_sharded_backends_say_which_scales_of_an_fp8_original_they_refuse(
    world: World, power_of_two: TrainResult
) -> None:
    refs = power_of_two.checkpoint, power_of_two.trainer_state
    supervised = {"checkpoint": refs[0], "trainer_state": refs[1]}
    policy, demonstrations = world.rl_job("one", own_dataset(world, power_of_two), *refs), world.sft_job("two")
    for job in (policy, demonstrations.model_copy(update=supervised)):
        with pytest.raises(TrainingConfigError, match=r"not the largest value over 448.*trainer\.launcher\.backend to"):
            run_job(job.model_copy(update={"backend": "fsdp2"}))


def swap_layer_dtype(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = "model.layers.1.input_layernorm.weight"
    save_file(tensors | {name: tensors[name].float()}, folder / WEIGHTS)


def add_layer(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    norm = tensors["model.norm.weight"].clone()
    save_file(tensors | {"model.layers.7.input_layernorm.weight": norm}, folder / WEIGHTS)


def untie(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, folder / WEIGHTS)


def two_revisions(folder: Path) -> None:
    notes = folder / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    for name, revision in (("config.json", "a" * 40), (WEIGHTS, "b" * 40)):
        (notes / f"{name}.metadata").write_text(f"{revision}\netag\n1.0\n")


def half_coded(folder: Path) -> None:
    fp8(folder)
    tensors = load_file(folder / WEIGHTS)
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.bfloat16)}, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            swap_layer_dtype,
            r"model\.layers\.1\.input_layernorm\.weight in .* is F32, but model.* is BF16: .*two",
        ),
        (add_layer, r"tensor model\.layers\.7\.input_layernorm\.weight is in the files, but config.json describes"),
        (untie, r"tie_word_embeddings is true, but lm_head\.weight differs from the embedding"),
        (two_revisions, r"config.json is of revision aaaaaaaaaaaa, but model.safetensors of bbbbbbbbbbbb"),
        (half_coded, r"tensor model\.layers\.0\.mlp\.up_proj\.weight is BF16, but quantization_config says fp8"),
        (fp8, r"quantization_config.weight_block_size = \[64, 64\] is not supported, only \[128, 128\]"),
        (
            lambda folder: edit(folder, vocab_size=8),
            r"tensor model\.embed_tokens\.weight is .*config.json says \(8",
        ),
        (
            lambda folder: edit(folder, model_type="mistral"),
            r"model_type 'mistral' is not supported: only qwen3_moe",
        ),
        (lambda folder: edit(folder, attention_bias=True), r"attention_bias = True is not supported"),
        (lambda folder: edit(folder, rope_parameters={"rope_type": "yarn"}), r"rotary scaling 'yarn' is not supported"),
        (lambda folder: edit(folder, quantization_config={"quant_method": "awq"}), r"quant_method = 'awq' is not supp"),
    ],
)
def test_an_original_of_mixed_or_unsupported_parts_is_refused_by_name(
    world: World, tmp_path: Path, spoil: Callable[[Path], Any], said: str
) -> None:
    original(world, tmp_path / "hf", "qwen3")
    spoil(tmp_path / "hf")
    if spoil is fp8:
        edit(tmp_path / "hf", quantization_config={"quant_method": "fp8", "weight_block_size": [64, 64]})
    with pytest.raises(TrainingDataError, match=said):
        import_checkpoint(tmp_path / "hf", world.store)


def test_another_models_tokenizer_is_refused(world: World, tmp_path: Path) -> None:
    original(world, tmp_path / "hf", "qwen3", vocab_size=world.vocabulary - 1)
    with pytest.raises(
        TrainingDataError, match=rf"tokenizer.json has {world.vocabulary} tokens, but config.json's vocab"
    ):
        import_checkpoint(tmp_path / "hf", world.store)
