"""Checkpoints and trainer states in parts: the digests of one file, and every reader takes them or names the fault."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer_rl import own_dataset
from trainer_world import TINY, World

from contracts import tensor_parts
from contracts.artifacts import find_artifact, open_artifact
from contracts.checkpoints import WEIGHTS, check_checkpoint
from contracts.errors import SchemaError, TriplaneError
from contracts.tensor_files import INDEX, TensorFiles
from inference.engines.vllm_plain import checkpoint_bytes, plain_checkpoint
from inference.engines.vllm_side.triplane_vllm.checkpoint import Checkpoint
from inference.engines.weights import LayerWeights, PlainTensors, read_weights
from ops.weights_fault import weights_fault
from trainer.errors import TrainingDataError, TrainingStopped
from trainer.export import load_checkpoint
from trainer.import_hf import import_checkpoint
from trainer.metrics import Record
from trainer.result import TrainResult
from trainer.run import run_job

PART = 150_000


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lowers the size of a part from now on."""
    return lambda: monkeypatch.setattr(tensor_parts, "PART_BYTES", PART)


@pytest.fixture
def sharded(world: World, cut: Callable[[], None]) -> Path:
    """A checkpoint in parts."""
    cut()
    return open_artifact(world.store, run_job(world.sft_job("parts")).checkpoint).directory()


def digests(result: TrainResult) -> tuple[str, str]:
    return result.checkpoint.digest, result.trainer_state.digest


def test_training_over_parts_gives_the_digests_of_single_files(world: World, cut: Callable[[], None]) -> None:
    base = run_job(world.sft_job("base"))
    dataset = own_dataset(world, base)
    whole = run_job(world.rl_job("whole", dataset, base.checkpoint, base.trainer_state))
    cut()

    def kill(record: Record) -> None:
        if record["step"] == 5:
            raise TrainingStopped(9)

    with pytest.raises(TrainingStopped):
        run_job(world.sft_job("base in parts"), [kill])
    base_in_parts = run_job(world.sft_job("base in parts"))
    assert digests(base_in_parts) == digests(base), "resumed from a snapshot in parts"
    in_parts = run_job(world.rl_job("parts", dataset, base_in_parts.checkpoint, base_in_parts.trainer_state))
    assert digests(in_parts) == digests(whole)
    for ref in (in_parts.checkpoint, in_parts.trainer_state):
        directory, names = open_artifact(world.store, ref).directory(), open_artifact(world.store, ref).names()
        parts = [name for name in names if name.endswith(".safetensors")]
        assert len(parts) > 5 and f"{parts[0].partition('-')[0]}.safetensors{INDEX}" in names
        largest = max((directory / name).stat().st_size for name in parts)
        assert largest <= PART or ref.kind == "trainer_state", "one float32 matrix is larger than a part"


def test_every_reader_takes_parts(world: World, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    single = tmp_path / "single"
    single.mkdir()
    shutil.copyfile(sharded / "config.json", single / "config.json")
    files = TensorFiles(sharded, WEIGHTS)
    monkeypatch.setattr(tensor_parts, "PART_BYTES", 10**9)
    tensor_parts.write_part(
        single / WEIGHTS, files.forms, lambda name: tensor_parts.bytes_of(files.tensor(name)), {"format": "pt"}
    )
    monkeypatch.setattr(tensor_parts, "PART_BYTES", PART)
    assert check_checkpoint(sharded) == check_checkpoint(single) and weights_fault(sharded) is None
    ours, theirs = load_checkpoint(sharded), load_checkpoint(single)
    assert all(torch.equal(ours.leaves[name], leaf) for name, leaf in theirs.leaves.items())
    served, expected = read_weights(sharded), read_weights(single)
    assert torch.equal(served.embedding, expected.embedding) and len(served.layers) == TINY.layers
    for own, other in zip(served.layers, expected.layers, strict=True):
        assert all(torch.equal(getattr(own, each.name), getattr(other, each.name)) for each in fields(LayerWeights))
    worker, plain = Checkpoint(str(sharded)), PlainTensors(single)
    assert all(torch.equal(worker.weight(name), plain.tensor(name)) for name in plain.shapes)


def test_the_dequantized_copy_is_cut_too_and_transformers_loads_it(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("TRIPLANE_CACHE", str(tmp_path / "cache"))
    copy, weights = plain_checkpoint(sharded, "d" * 64), PlainTensors(sharded)
    parts = sorted(copy.glob("*.safetensors"))
    assert len(parts) > 5 and checkpoint_bytes(copy) > 3 * checkpoint_bytes(sharded)
    model, info = transformers.Qwen3MoeForCausalLM.from_pretrained(
        copy, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    assert not info["unexpected_keys"] and set(info["missing_keys"]) <= {"lm_head.weight"}
    query = weights.tensor("model.layers.1.self_attn.q_proj.weight")
    assert torch.equal(model.model.layers[1].self_attn.q_proj.weight, query)
    made = parts[0].stat().st_mtime_ns
    assert plain_checkpoint(sharded, "d" * 64) == copy and parts[0].stat().st_mtime_ns == made
    parts[2].unlink()
    assert plain_checkpoint(sharded, "d" * 64) == copy and parts[2].is_file(), "what was swept is made again"


def writable(path: Path) -> Path:
    path.chmod(0o644)
    return path


def flip_last_bit(part: Path) -> None:
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)


def missing(directory: Path) -> str:
    part = sorted(directory.glob("*.safetensors"))[1]
    part.unlink()
    return f"names the part {part.name}, which is missing"


def truncated(directory: Path) -> str:
    part = writable(sorted(directory.glob("*.safetensors"))[1])
    part.write_bytes(part.read_bytes()[:-7])
    return f"{part.name} is not a readable safetensors file"


def absent_tensor(directory: Path) -> str:
    index = writable(directory / f"{WEIGHTS}{INDEX}")
    body = json.loads(index.read_text())
    body["weight_map"]["model.other.weight"] = next(iter(body["weight_map"].values()))
    index.write_text(json.dumps(body))
    return "names tensor model.other.weight"


def another_part(directory: Path) -> str:
    part = writable(sorted(directory.glob("*.safetensors"))[-1])
    flip_last_bit(part)
    return f"{part.name} does not match its index: it was changed, or is part of another checkpoint"


@pytest.mark.parametrize("damage", [missing, truncated, absent_tensor, another_part])
def test_every_reader_names_the_fault(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], str]
) -> None:
    monkeypatch.setenv("TRIPLANE_CACHE", str(tmp_path / "cache"))
    broken = Path(shutil.copytree(sharded, tmp_path / "broken"))
    said = damage(broken)
    readers: list[Callable[[Path], Any]] = [
        load_checkpoint,
        read_weights,
        lambda path: plain_checkpoint(path, "e" * 64),
    ]
    for read in readers:
        with pytest.raises(SchemaError) as caught:
            read(broken)
        assert said in str(caught.value)
    assert said in (weights_fault(broken) or "")
    assert not list((tmp_path / "cache").rglob("config.json")), "no half copy looks like a checkpoint"


def test_a_resumed_state_with_a_changed_part_is_refused(world: World, cut: Callable[[], None]) -> None:
    base = run_job(world.sft_job("base"))
    dataset = own_dataset(world, base)
    cut()
    base = run_job(world.sft_job("parts"))
    directory = open_artifact(world.store, base.trainer_state).directory()
    part = writable(sorted(directory.glob("state-*.safetensors"))[0])
    flip_last_bit(part)
    with pytest.raises(TriplaneError, match=rf"{part.name} does not match its manifest"):
        run_job(world.rl_job("g", dataset, base.checkpoint, base.trainer_state))


def test_an_imported_directory_may_be_sharded(world: World, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = TINY.hf_config(world.vocabulary)
    body = {name: value for name, value in config.items() if name not in ("quantization_config", "torch_dtype")}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**body)).to(torch.bfloat16)
    keys = []
    for name, size in (("whole", "1GB"), ("parts", "300KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        for each in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (tmp_path / name / each).write_bytes(world.tokenizer.path(each).read_bytes())
        keys.append(import_checkpoint(tmp_path / name, world.store).ref)
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 3 and keys[0] == keys[1]
    assert find_artifact(world.store, "trainer_state", keys[0].key) is not None
    said = missing(tmp_path / "parts")
    with pytest.raises(TrainingDataError, match=said):
        import_checkpoint(tmp_path / "parts", world.store)
