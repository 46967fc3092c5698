"""Float32 copies of FP8 checkpoints, for servers that do not load FP8 blocks (vLLM on a CPU), in $TRIPLANE_CACHE.

Written one tensor at a time, in parts as `contracts.tensor_parts` cuts them.
"""

from __future__ import annotations

import json
from pathlib import Path

from contracts.checkpoints import WEIGHTS
from contracts.digests import canonical_json
from contracts.filecache import FileCache, cache_base, cache_limit
from contracts.tensor_files import INDEX
from contracts.tensor_parts import Part, bytes_of, cut_parts, index_json, part_names, write_part
from inference.engines.weights import PlainTensors

CONFIG = "config.json"
_METADATA = {"format": "pt"}


def plain_checkpoint(directory: Path, version: str) -> Path:
    """Directory with the dequantized float32 weights of the checkpoint in `directory`, with version `version`.

    Complete or absent; shared by all processes of a user; the cache removes the least recently used copies. Raises
    SchemaError, StoreError.
    """
    cache = FileCache(cache_base(), "dequantized", cache_limit())
    checkpoint = PlainTensors(directory)
    cuts = cut_parts({name: ("F32", shape) for name, shape in checkpoint.shapes.items()})
    files = dict(zip(part_names(WEIGHTS, len(cuts)), cuts, strict=True))
    others = [f"{WEIGHTS}{INDEX}", CONFIG] if len(cuts) > 1 else [CONFIG]
    found = [cache.find(f"{version}/{name}") for name in (*files, *others)]
    if None not in found:
        return Path(str(found[0])).parent
    parts: dict[str, Part] = {}
    for name, forms in files.items():
        with cache.fill(f"{version}/{name}") as (partial, _):
            parts[name] = write_part(partial, forms, lambda tensor: bytes_of(checkpoint.tensor(tensor)), _METADATA)
    plain = {name: value for name, value in checkpoint.config.items() if name != "quantization_config"}
    bodies = {CONFIG: canonical_json({**plain, "dtype": "float32"}), f"{WEIGHTS}{INDEX}": index_json(parts)}
    for name in others:
        with cache.fill(f"{version}/{name}") as (partial, target):
            partial.write_bytes(bodies[name])
    return target.parent


def is_quantized_checkpoint(directory: Path) -> bool:
    """Whether the checkpoint contains FP8 blocks."""
    return "quantization_config" in json.loads((directory / CONFIG).read_text())


def checkpoint_bytes(directory: Path) -> int:
    """Size of the checkpoint's weights."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
