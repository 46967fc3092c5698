"""Float32 copies of FP8 checkpoints, for servers that do not load FP8 blocks (vLLM on a CPU), in $TRIPLANE_CACHE.

Written one tensor at a time, in parts as `contracts.tensor_parts` cuts them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from contracts.checkpoints import WEIGHTS
from contracts.digests import canonical_json
from contracts.errors import StoreError
from contracts.filecache import FileCache, cache_base, cache_limit
from contracts.tensor_files import INDEX, Form
from contracts.tensor_parts import Part, bytes_of, cut_parts, index_json, part_names, write_part
from inference.engines.weights import PlainTensors

CONFIG = "config.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
"""Needed by a server that follows grammars."""
_METADATA = {"format": "pt"}


def plain_checkpoint(directory: Path, version: str) -> Path:
    """Directory with the dequantized float32 weights of the checkpoint in `directory`, with version `version`.

    Complete or absent; shared by all processes of a user; the cache removes the least recently used copies. Raises
    SchemaError, StoreError.
    """
    cache = FileCache(cache_base(), "dequantized", cache_limit())
    checkpoint = PlainTensors(directory)
    names = [*_parts(checkpoint), *_others(checkpoint)]
    found = [cache.find(f"{version}/{name}") for name in names]
    if None in found:
        _write(checkpoint, lambda name: _filled(cache, f"{version}/{name}"))
        found = [cache.find(f"{version}/{names[-1]}")]
    if found[0] is None:
        raise StoreError(f"cache {cache_base()} lost a copy that was just written: raise TRIPLANE_CACHE_GB")
    return found[0].parent


def write_plain(directory: Path, target: Path) -> None:
    """Write the dequantized float32 weights of the checkpoint in `directory` to the existing folder `target`."""
    _write(PlainTensors(directory), lambda name: nullcontext(target / name))


def _write(checkpoint: PlainTensors, fill: Callable[[str], AbstractContextManager[Path]]) -> None:
    """Write all files of a plain copy, config.json last. fill(name) gives the path to write to."""
    parts: dict[str, Part] = {}
    for name, forms in _parts(checkpoint).items():
        with fill(name) as path:
            parts[name] = write_part(path, forms, lambda tensor: bytes_of(checkpoint.tensor(tensor)), _METADATA)
    plain = {name: value for name, value in checkpoint.config.items() if name != "quantization_config"}
    bodies = {CONFIG: canonical_json({**plain, "dtype": "float32"}), f"{WEIGHTS}{INDEX}": index_json(parts)}
    for name in _others(checkpoint):
        with fill(name) as path:
            path.write_bytes(bodies[name] if name in bodies else (checkpoint.directory / name).read_bytes())


def _parts(checkpoint: PlainTensors) -> dict[str, dict[str, Form]]:
    """Tensors of each part by file name."""
    cuts = cut_parts({name: ("F32", shape) for name, shape in checkpoint.shapes.items()})
    return dict(zip(part_names(WEIGHTS, len(cuts)), cuts, strict=True))


def _others(checkpoint: PlainTensors) -> list[str]:
    index = [f"{WEIGHTS}{INDEX}"] if len(_parts(checkpoint)) > 1 else []
    return [*(name for name in TOKENIZER if (checkpoint.directory / name).is_file()), *index, CONFIG]


@contextmanager
def _filled(cache: FileCache, key: str) -> Iterator[Path]:
    with cache.fill(key) as (partial, _):
        yield partial


def is_quantized_checkpoint(directory: Path) -> bool:
    """Whether the checkpoint contains FP8 blocks."""
    return "quantization_config" in json.loads((directory / CONFIG).read_bytes())


def checkpoint_bytes(directory: Path) -> int:
    """Size of the checkpoint's weights."""
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
