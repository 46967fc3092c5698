"""Patches: what a derived template has in place of its base's files, packed into one small file.

packed = zlib(header + new)
  header  one line of JSON: {"base": digest, "removed": [path], "changed": {path: [start, end, length]}}
  new     for each changed path, in that order, `length` bytes: the file is base[:start] + new + base[len(base) - end:]

A patch holds only what its base lacks, so that a changed line takes some tens of bytes. The base's files are needed to
read it.
"""

from __future__ import annotations

import bisect
import json
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from envd.trees import Tree


@dataclass(frozen=True)
class Patch:
    """Difference between a derived template and its base."""

    base: str
    """Digest of the base, a template that is stored whole."""
    changed: Mapping[str, bytes]
    """Whole content of files that the base lacks or has otherwise, by path."""
    removed: frozenset[str]
    """Paths of the base that the derived template lacks."""

    def then(self, changed: Tree, removed: frozenset[str], base_paths: Collection[str]) -> Patch:
        """This patch followed by another one. base_paths: the paths of the base."""
        kept = {path: content for path, content in self.changed.items() if path not in removed}
        lacking = (self.removed | {path for path in removed if path in base_paths}) - changed.keys()
        return Patch(self.base, kept | dict(changed), lacking)

    def pack(self, base: Path) -> bytes:
        """Packed patch. base: directory of the base's files. Blocking."""
        ranges, new = {}, []
        for path, content in self.changed.items():
            start, end = _common(_read(base / path), content)
            new.append(content[start : len(content) - end])
            ranges[path] = (start, end, len(new[-1]))
        header = {"base": self.base, "removed": sorted(self.removed), "changed": ranges}
        return zlib.compress(json.dumps(header).encode() + b"\n" + b"".join(new))

    @classmethod
    def unpack(cls, packed: bytes, base: Path) -> Self:
        """Patch from the bytes of `pack`. base: directory of the base's files. Blocking."""
        first, _, new = zlib.decompress(packed).partition(b"\n")
        header, changed, at = json.loads(first), {}, 0
        for path, (start, end, length) in header["changed"].items():
            old = _read(base / path)
            changed[path] = old[:start] + new[at : at + length] + old[len(old) - end :]
            at += length
        return cls(header["base"], changed, frozenset(header["removed"]))


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _common(old: bytes, new: bytes) -> tuple[int, int]:
    """Lengths of the longest common start and, in the rest, of the longest common end."""
    most = min(len(old), len(new))
    start = _longest(most, lambda size: old[:size] == new[:size])
    end = _longest(most - start, lambda size: old[len(old) - size :] == new[len(new) - size :])
    return start, end


def _longest(most: int, common: Callable[[int], bool]) -> int:
    """Largest size up to `most` for which `common` holds; it holds for all sizes below."""
    return bisect.bisect_left(range(1, most + 1), True, key=lambda size: not common(size))
