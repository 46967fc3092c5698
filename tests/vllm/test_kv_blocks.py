"""Blocks of keys and values that the forecast predicts, and those that a real vLLM reports on this CPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from inference.engines.vllm_memory import NARROW, token_bytes
from tests.vllm.conftest import HERE, real_config

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
SPACE_GIB = 1
COMMON = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 256,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 64}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": None}
DEEPSEEK = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy"}
SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "grouped queries": (QWEN3, "auto"),
    "a head of keys for each query's": ({**QWEN3, "num_key_value_heads": 4, "num_hidden_layers": 3}, "auto"),
    "one head of keys": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 1, "head_dim": 128},
        "auto",
    ),
    "mixture of experts": (
        {**MIXTURE, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "head_dim": 32},
        "auto",
    ),
    "latent": (
        {
            **{**MIXTURE, **LATENT, **DEEPSEEK, "first_k_dense_replace": 2, "moe_layer_freq": 1},
            **{"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "num_key_value_heads": 4},
        },
        "auto",
    ),
    "FP8": (QWEN3, "fp8_e5m2"),
}


def test_predicted_blocks_are_those_of_a_real_vllm(tmp_path: Path) -> None:
    arguments: list[str] = []
    for name, (shape, cache) in SHAPES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**COMMON, **shape}))
        arguments += [str(tmp_path / name), cache]
    environment = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        **{"VLLM_CPU_KVCACHE_SPACE": str(SPACE_GIB), "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"},
        **{"VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    }
    command = [real_config().python, str(HERE / "kv_blocks.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name, (shape, cache) in SHAPES.items():
        blocks, size = found[str(tmp_path / name)]
        narrow = 1 if cache.startswith("fp8") else NARROW
        assert blocks == (SPACE_GIB << 30) // (size * token_bytes({**COMMON, **shape}, 1, narrow)), name
    print({Path(folder).name: blocks for folder, (blocks, _) in found.items()})
