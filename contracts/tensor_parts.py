"""Write named tensors as safetensors files, one tensor in memory at a time, hashed while written.

    forms (dtype, shape) --cut_parts--> parts of at most PART_BYTES --write_part--> files --add_tensors--> artifact

Tensors that fit into one part become one file, byte for byte that of safetensors' own writer. The content digest is
over the tensors and does not depend on how they are cut: the index counts under the name of the single file, and the
parts, like telemetry, not at all. `contracts.tensor_files` describes both layouts and reads them.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from contracts.artifacts import ArtifactWriter
from contracts.digests import canonical_json, tensors_digest
from contracts.failpoints import failpoint
from contracts.tensor_files import DTYPES, INDEX, Form, byte_size

if TYPE_CHECKING:
    from torch import Tensor

PART_BYTES = 4 * 10**9
"""Largest part in bytes; a tensor above it becomes a part of its own."""
HEADER_BYTES = 128
"""Bytes of a tensor's entry in the header, besides its name, at most."""
_ORDER = {dtype: number for number, dtype in enumerate(DTYPES)}

ReadTensor = Callable[[str], memoryview]
"""Little-endian bytes of the tensor with this name."""


@dataclass(frozen=True)
class Part:
    """One written file."""

    file: str
    size: int
    """Bytes."""
    sha256: str
    tensors: dict[str, tuple[str, tuple[int, ...], str]]
    """Dtype, shape and SHA-256 of each tensor."""


def cut_parts(forms: Mapping[str, Form]) -> list[dict[str, Form]]:
    """Consecutive tensors, in as few parts of at most PART_BYTES as that order allows. At least one part."""
    parts: list[dict[str, Form]] = [{}]
    room = PART_BYTES
    for name, form in forms.items():
        size = byte_size(form) + len(name) + HEADER_BYTES
        if size > room and parts[-1]:
            parts.append({})
            room = PART_BYTES
        parts[-1][name] = form
        room -= size
    return parts


def part_names(name: str, count: int) -> list[str]:
    """Names of the files: `name` itself, or `<stem>-00001-of-0000N.safetensors` and so on."""
    if count == 1:
        return [name]
    path = Path(name)
    return [
        str(path.with_name(f"{path.stem}-{number:05}-of-{count:05}{path.suffix}")) for number in range(1, count + 1)
    ]


def write_part(
    path: Path, forms: Mapping[str, Form], read: ReadTensor, metadata: Mapping[str, str] | None = None
) -> Part:
    """Write one safetensors file. Raises OSError.

    read: called once for each tensor, in the order of the file. metadata: of the file's header.
    """
    ordered = sorted(forms, key=lambda name: (_ORDER[forms[name][0]], name))
    whole, tensors, offset = hashlib.sha256(), {}, 0
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for name in ordered:
        dtype, shape = forms[name]
        end = offset + byte_size(forms[name])
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        for data in (struct.pack("<Q", len(text)), text):
            file.write(data)
            whole.update(data)
        for name in ordered:
            view = read(name)
            if view.nbytes != byte_size(forms[name]):
                raise ValueError(f"tensor {name} has {view.nbytes} bytes, its form is {forms[name]}")
            file.write(view)
            whole.update(view)
            tensors[name] = (*forms[name], hashlib.sha256(view).hexdigest())
    failpoint("part-written")
    return Part(path.name, 8 + len(text) + offset, whole.hexdigest(), tensors)


def add_tensors(
    out: ArtifactWriter,
    name: str,
    forms: Mapping[str, Form],
    read: ReadTensor,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors into an artifact's stage and name them as its file `name`, or as the parts of it."""
    cuts = cut_parts(forms)
    files = part_names(name, len(cuts))
    parts = [write_part(out.directory / file, cut, read, metadata) for file, cut in zip(files, cuts, strict=True)]
    for file, part in zip(files, parts, strict=True):
        if len(parts) == 1:
            out.add_file(file, parts_digest(parts), sha256=part.sha256)
        else:
            out.add_file(file, sha256=part.sha256, telemetry=True)
    _add_index(out, name, parts)


def name_stored(out: ArtifactWriter, name: str, parts: Sequence[Part]) -> None:
    """Name parts that are in the artifact's attempt already, under the names of `name`, and add their index."""
    digest = parts_digest(parts) if len(parts) == 1 else None
    for file, part in zip(part_names(name, len(parts)), parts, strict=True):
        out.add_stored(file, part.size, part.sha256, digest)
    _add_index(out, name, parts)


def _add_index(out: ArtifactWriter, name: str, parts: Sequence[Part]) -> None:
    if len(parts) > 1:
        files = part_names(name, len(parts))
        (out.directory / f"{name}{INDEX}").write_bytes(index_json(dict(zip(files, parts, strict=True))))
        out.add_file(f"{name}{INDEX}", parts_digest(parts))


def index_json(parts: Mapping[str, Part]) -> bytes:
    """Content of the index. parts: by the name of their file."""
    places = {tensor: file for file, part in parts.items() for tensor in part.tensors}
    total = sum(byte_size((dtype, shape)) for part in parts.values() for dtype, shape, _ in part.tensors.values())
    metadata = {"total_size": total, "sha256": {file: part.sha256 for file, part in parts.items()}}
    return canonical_json({"metadata": metadata, "weight_map": places})


def parts_digest(parts: Iterable[Part]) -> str:
    """Content digest of all tensors of some parts."""
    return tensors_digest((name, *tensor) for part in parts for name, tensor in part.tensors.items())


def form_of(tensor: Tensor) -> Form:
    """Dtype and shape of a tensor."""
    return _SAFETENSORS[str(tensor.dtype)], tuple(tensor.shape)


def bytes_of(tensor: Tensor) -> memoryview:
    """Bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    import torch  # not needed by processes that write no tensors

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


_SAFETENSORS = {f"torch.{theirs}": ours for ours, (theirs, _) in DTYPES.items()}
