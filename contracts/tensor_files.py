"""Named tensors on disk: one safetensors file, or parts of it with the index of Hugging Face.

    model.safetensors                                                     tensors that fit into one part
    model-00001-of-00002.safetensors  ...  model.safetensors.index.json   more tensors

`weight_map` of the index names the part of each tensor. Indexes that Triplane writes also have the SHA-256 of each
part, in `metadata.sha256`. `contracts.tensor_parts` writes both forms; `TensorFiles` reads them, one tensor at a time.
Sources: the safetensors format description; transformers' documentation of sharded checkpoints.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contracts.digests import has_sha256
from contracts.errors import SchemaError

if TYPE_CHECKING:
    from torch import Tensor

Form = tuple[str, tuple[int, ...]]
"""safetensors dtype and shape of a tensor."""
INDEX = ".index.json"
"""Suffix that makes the name of the index from the name of the single file."""
DTYPES: Mapping[str, tuple[str, int]] = {
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""safetensors dtype -> (torch's name, bytes of an element), in the order in which a file stores them."""
_PIECE = 1 << 22
"""Elements that are checked at once."""
_AGAIN = "write or fetch it again"


@dataclass(frozen=True)
class Place:
    """Position of a tensor in its file."""

    form: Form
    start: int
    """Offset in the file, bytes."""
    size: int


def byte_size(form: Form) -> int:
    """Number of bytes of a tensor."""
    return DTYPES[form[0]][1] * math.prod(form[1])


def read_header(path: Path) -> dict[str, Place]:
    """Tensors of a safetensors file, from its header alone. Raises SchemaError."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        places = {name: _place(entry, 8 + length) for name, entry in entries.items()}
        end = 8 + length
        for place in sorted(places.values(), key=lambda each: (each.start, each.size)):
            if place.start != end:
                raise ValueError("its tensors overlap or leave gaps")
            end += place.size
        if end != size:
            raise ValueError(f"its size of {size} bytes does not match its header: it was truncated or extended")
        return places
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SchemaError(f"{path} is not a readable safetensors file ({error}): {_AGAIN}") from None


def _place(entry: Mapping[str, Any], origin: int) -> Place:
    form = (str(entry["dtype"]), tuple(int(side) for side in entry["shape"]))
    start, end = entry["data_offsets"]
    if form[0] not in DTYPES:
        raise ValueError(f"dtype {form[0]} is not supported")
    if end - start != byte_size(form):
        raise ValueError(f"{end - start} bytes for a tensor {form}")
    return Place(form, origin + start, end - start)


class TensorFiles:
    """Reader of the tensors called `name` in a directory, in one file or in parts.

    The layout is checked at once, from the headers. A part with a known digest is checked against it before its first
    tensor is read.
    """

    def __init__(self, directory: Path, name: str) -> None:
        """Raises SchemaError with the name of the missing, damaged or contradicting file or tensor."""
        self._directory = directory
        index = directory / f"{name}{INDEX}"
        self._sha256: dict[str, str] = {}
        """Digest of each part that the index gives one for."""
        if not index.is_file():
            self._headers = {name: read_header(directory / name)}
        elif (directory / name).exists():
            raise SchemaError(f"{directory} has {name} and {index.name}: remove the one that is not in use")
        else:
            self._headers, self._sha256 = _read_parts(index)
        self._files = {tensor: file for file, header in self._headers.items() for tensor in header}
        self.forms = {tensor: place.form for header in self._headers.values() for tensor, place in header.items()}
        """Dtype and shape of every tensor."""

    def path(self, name: str) -> Path:
        """File that holds a tensor. Raises SchemaError if none does."""
        if name not in self._files:
            raise SchemaError(f"{self._directory} has no readable tensor {name}: {_AGAIN}")
        return self._directory / self._files[name]

    def read_into(self, name: str, target: memoryview) -> None:
        """Read a tensor's bytes. target: writable, of the tensor's size. Raises SchemaError."""
        path = self.path(name)
        place, done = self._headers[path.name][name], 0
        try:
            expected = self._sha256.get(path.name)
            if expected is not None and not has_sha256(path, expected):
                raise SchemaError(
                    f"{path} does not match its index: it was changed, or is part of another checkpoint; {_AGAIN}"
                )
            with path.open("rb", buffering=0) as file:
                file.seek(place.start)
                while done < place.size and (count := file.readinto(target[done:])):
                    done += count
        except OSError as error:
            raise SchemaError(f"{path}: tensor {name} is not readable ({error.strerror}): {_AGAIN}") from None
        if done < place.size:
            raise SchemaError(f"{path} was truncated while tensor {name} was being read: {_AGAIN}")

    def tensor(self, name: str) -> Tensor:
        """A tensor, in memory of its own. Raises SchemaError."""
        import torch  # not needed by processes that read only headers

        dtype, shape = self._headers[self.path(name).name][name].form
        found = torch.empty(shape, dtype=getattr(torch, DTYPES[dtype][0]))
        self.read_into(name, found.reshape(-1).view(torch.uint8).numpy().data)
        return found


def is_finite(tensor: Tensor) -> bool:
    """Whether no number is infinite or not a number. Needs little memory besides the tensor."""
    import torch

    return all(bool(torch.isfinite(piece.float()).all()) for piece in torch.split(tensor.reshape(-1), _PIECE))


def _read_parts(index: Path) -> tuple[dict[str, dict[str, Place]], dict[str, str]]:
    """Header and, where the index has one, digest of each part. Raises SchemaError."""
    try:
        body = json.loads(index.read_bytes())
        named: dict[str, str] = dict(body["weight_map"])
        digests: dict[str, str] = dict((body.get("metadata") or {}).get("sha256") or {})
        parts = sorted(set(named.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SchemaError(f"{index} is not a readable index of tensors ({error!r}): {_AGAIN}") from None
    headers, found = {}, dict[str, str]()
    for part in parts:
        path = index.parent / part
        if Path(part).name != part or not path.is_file():
            raise SchemaError(f"{index} names the part {part}, which is missing: {_AGAIN}")
        headers[part] = read_header(path)
        for tensor in headers[part]:
            if tensor in found:
                raise SchemaError(
                    f"{index.parent}: tensor {tensor} is in two parts, {found[tensor]} and {part}: {_AGAIN}"
                )
            found[tensor] = part
    for tensor, part in named.items():
        if found.get(tensor) != part:
            raise SchemaError(f"{index} names tensor {tensor} in {part}, which lacks it: {_AGAIN}")
    for tensor, part in found.items():
        if tensor not in named:
            raise SchemaError(f"{index.parent / part} holds tensor {tensor}, which its index does not name: {_AGAIN}")
    return headers, digests
