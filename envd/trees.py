"""Trees of files: the digest that names a template, and what one tree has in place of another's files."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

Tree = Mapping[str, bytes]
"""Content of files by their path."""


def template_digest(files: Tree) -> str:
    """Digest of a template: SHA-256 over the sorted paths and the SHA-256 of each content."""
    return digest_of_hashes(hashes_of(files))


def digest_of_hashes(hashes: Mapping[str, bytes]) -> str:
    """Digest of a template whose contents have these SHA-256 digests (32 bytes each) by path."""
    whole = hashlib.sha256(b"envd template 1\n")
    for path, each in sorted(hashes.items()):
        whole.update(path.encode() + b"\0" + each)
    return whole.hexdigest()


def hashes_of(files: Tree) -> dict[str, bytes]:
    """SHA-256 (32 bytes) of each content, by path."""
    return {path: hashlib.sha256(content).digest() for path, content in files.items()}


def changes(base: Tree, files: Tree) -> tuple[dict[str, bytes], list[str]]:
    """Files that differ from those of `base` or that it lacks, and paths of `base` that `files` lacks, sorted."""
    changed = {path: content for path, content in files.items() if base.get(path) != content}
    return changed, sorted(base.keys() - files.keys())


def patched(base: Tree, changed: Tree, removed: Iterable[str]) -> dict[str, bytes]:
    """`base` without the removed paths and with the changed files."""
    left_out = frozenset(removed)
    return {path: content for path, content in base.items() if path not in left_out} | dict(changed)
