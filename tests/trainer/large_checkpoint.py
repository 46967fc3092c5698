"""One step of the life of a large random checkpoint, in a process of its own: prints its peak memory as JSON.

python large_checkpoint.py write|verify|engine|plain|transformers STORE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from contracts import tensor_parts
from contracts.artifacts import ArtifactWriter, find_artifact
from contracts.checkpoints import WEIGHTS, check_checkpoint, expected_tensors
from contracts.digests import sha256
from contracts.store import LocalStore
from contracts.tensor_files import Form, TensorFiles, byte_size
from contracts.tensor_parts import add_tensors, bytes_of
from trainer.model_config import ModelConfig

KEY = "0" * 64
PART = 512 * 10**6
MODEL = ModelConfig(
    hidden_size=512,
    layers=10,
    experts=128,
    expert_width=1024,
    experts_per_token=2,
    heads=8,
    kv_heads=8,
    head_dim=64,
    tie_word_embeddings=False,
)
VOCABULARY = 240_000


def drawn(name: str, form: Form) -> Tensor:
    """Random weights, a function of the name."""
    random = torch.Generator().manual_seed(int(sha256(name.encode())[:8], 16))
    dtype, shape = form
    if dtype == "F8_E4M3":
        codes = torch.randint(0, 0x7F, shape, generator=random, dtype=torch.uint8)
        return codes.view(torch.float8_e4m3fn)
    return torch.empty(shape).uniform_(1e-4, 2e-4, generator=random)


def write(store: LocalStore) -> dict[str, Any]:
    """Commit the checkpoint."""
    config = MODEL.hf_config(VOCABULARY)
    forms = expected_tensors(config)
    tensor_parts.PART_BYTES = PART
    with ArtifactWriter(store, "checkpoint", KEY, parents={}, config={}, code_version="1") as out:
        add_tensors(out, WEIGHTS, forms, lambda name: bytes_of(drawn(name, forms[name])), {"format": "pt"})
        out.add_json("config.json", config)
        entries = out.commit().manifest.files
    sizes = [entry.size for entry in entries if entry.path.endswith(".safetensors")]
    return {"parts": len(sizes), "bytes": sum(sizes), "largest": max(sizes)}


def verify(store: LocalStore) -> dict[str, Any]:
    """Check every byte against the manifest, and the layout; then read some tensors."""
    directory = directory_of(store)
    check_checkpoint(directory)
    files = TensorFiles(directory, WEIGHTS)
    small = [name for name, form in files.forms.items() if byte_size(form) < 10**7]
    for name in small[::500]:
        assert torch.equal(files.tensor(name).view(torch.uint8), drawn(name, files.forms[name]).view(torch.uint8)), name
    return {}


def engine(store: LocalStore) -> dict[str, Any]:
    """Load the weights of the built-in engine."""
    from inference.engines.weights import read_weights

    weights = read_weights(directory_of(store))
    size = sum(each.nbytes for layer in weights.layers for each in vars(layer).values())
    return {"model": size + weights.embedding.nbytes + weights.head.nbytes}


def plain(store: LocalStore) -> dict[str, Any]:
    """Make the dequantized copy."""
    from inference.engines.vllm_plain import plain_checkpoint

    tensor_parts.PART_BYTES = PART
    return {"directory": str(plain_checkpoint(directory_of(store), KEY))}


def transformers(store: LocalStore) -> dict[str, Any]:
    """Load the dequantized copy with `from_pretrained`."""
    from transformers import Qwen3MoeForCausalLM

    from inference.engines.weights import PlainTensors

    model, info = Qwen3MoeForCausalLM.from_pretrained(
        plain(store)["directory"], dtype=torch.bfloat16, output_loading_info=True, local_files_only=True
    )
    checkpoint = PlainTensors(directory_of(store))
    for name in ("lm_head.weight", "model.layers.7.self_attn.k_proj.weight"):
        assert torch.equal(model.get_parameter(name), checkpoint.tensor(name).bfloat16()), name
    expert = checkpoint.tensor("model.layers.3.mlp.experts.77.down_proj.weight").bfloat16()
    assert torch.equal(model.model.layers[3].mlp.experts.down_proj[77], expert)
    return {"missing": sorted(info["missing_keys"]), "unexpected": sorted(info["unexpected_keys"])}


def directory_of(store: LocalStore) -> Path:
    """The committed checkpoint, verified."""
    found = find_artifact(store, "checkpoint", KEY)
    assert found is not None
    return found.directory()


def memory(field: str) -> int:
    """Resident bytes: now (VmRSS) or at their peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


if __name__ == "__main__":
    step, where = sys.argv[1:]
    torch.set_num_threads(1)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM: proc(5)
    before = memory("VmRSS")
    found = globals()[step](LocalStore(Path(where)))
    print(json.dumps({**found, "peak": memory("VmHWM") - before}))
