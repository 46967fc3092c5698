"""Load a checkpoint with vLLM's own loader, in its environment: prints the model's bytes and the peak memory as JSON.

.venv-vllm/bin/python large_in_vllm.py DIRECTORY
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models import qwen3_moe  # noqa: F401 - or its import would count as memory of the loader

COMPARED = "model.embed_tokens.weight"
"""A tensor that vLLM doesn't pack for the processor."""


def memory(field: str) -> int:
    """Resident bytes: now (VmRSS) or at their peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def main(directory: Path) -> None:
    """Load, and compare one tensor with its file."""
    torch.set_num_threads(1)
    torch.accelerator.empty_cache = lambda: None  # as vLLM's worker for CPUs does
    options = EngineArgs(
        model=str(directory), skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", max_model_len=64
    )
    config = options.create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/meeting", backend="gloo")
        ensure_model_parallel_initialized(1, 1)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM: proc(5)
        before = memory("VmRSS")
        model = get_model(vllm_config=config)
        peak = memory("VmHWM") - before
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    with safe_open(directory / index[COMPARED], "pt") as file:
        same = torch.equal(model.get_parameter(COMPARED), file.get_tensor(COMPARED).bfloat16())
    size = sum(each.nbytes for each in {each.data_ptr(): each for each in model.parameters()}.values())
    print(json.dumps({"model": size, "peak": peak, "same": same}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
