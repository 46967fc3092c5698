"""Float32 copies of FP8 checkpoints, for servers that do not load FP8 blocks (vLLM on a CPU), in $TRIPLANE_CACHE."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from contracts.checkpoints import WEIGHTS
from contracts.digests import canonical_json
from contracts.filecache import FileCache, cache_base, cache_limit
from inference.engines.weights import read_tensors

CONFIG = "config.json"


def plain_checkpoint(directory: Path, version: str) -> Path:
    """Directory with the dequantized float32 weights of the checkpoint in `directory`, with version `version`.

    Complete or absent; shared by all processes of a user; the cache removes the least recently used copies. Raises
    SchemaError, StoreError.
    """
    cache = FileCache(cache_base(), "dequantized", cache_limit())
    keys = [f"{version}/{name}" for name in (CONFIG, WEIGHTS)]
    found = [cache.find(key) for key in keys]
    if None in found:
        config, tensors = read_tensors(directory)
        config.pop("quantization_config", None)
        for key in keys:
            with cache.fill(key) as (partial, target):
                if key.endswith(CONFIG):
                    partial.write_bytes(canonical_json({**config, "dtype": "float32"}))
                else:
                    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
                    save_file(whole, str(partial), metadata={"format": "pt"})
    else:
        target = Path(str(found[0]))
    return target.parent


def is_quantized_checkpoint(directory: Path) -> bool:
    """Whether the checkpoint contains FP8 blocks."""
    return "quantization_config" in json.loads((directory / CONFIG).read_text())


def checkpoint_bytes(directory: Path) -> int:
    """Size of the checkpoint's weights."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
