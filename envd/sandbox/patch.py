"""Apply plain patches without git, and remove files from a patch. The caller leaves other patches to git.

A plain patch changes, adds or deletes text files, and every hunk matches exactly at its line number. Most final states
of an episode are plain, and starting git takes longer than the rest of a verification's preparation.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from envd.tools.paths import make_parents, open_in_root

_HEADER = re.compile(rb"diff --git a/([\w./-]+) b/([\w./-]+)\n")
_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_PLAIN = re.compile(rb"(?:(new|deleted) file mode 100644\n)?index \w+\.\.\w+(?: 100\d{3})?\n--- (\S+)\n\+\+\+ (\S+)\n")
_SECTION = re.compile(rb"^diff --git ", re.MULTILINE)
_ESCAPE = re.compile(rb'\\([0-7]{3}|[tn"\\])')
_ESCAPED = {b"t": b"\t", b"n": b"\n", b'"': b'"', b"\\": b"\\"}


class NotPlain(Exception):
    """The patch is not plain and needs git."""


def apply_plain(root: Path, patch: bytes) -> None:
    """Apply a whole plain patch below root. Raises NotPlain, for other patches before anything is written."""
    before, sections = _cut(patch)
    if not sections or before:
        raise NotPlain
    results = [_section(root, section) for section in sections]
    if len({path for path, _ in results}) != len(results):
        raise NotPlain
    try:
        for path, content in results:
            _store(root, path, content)
    except OSError as error:
        raise NotPlain from error


def without_files(patch: bytes, wanted: Callable[[str], bool]) -> tuple[bytes, list[str]]:
    """Return the patch without the sections of unwanted files, and the paths of these files.

    A section whose header does not name exactly one path stays. Callers that rely on the result must check the changed
    files, too.
    """
    before, sections = _cut(patch)
    kept, dropped = [before], list[str]()
    for section in sections:
        path = _named(section)
        if path is None or wanted(path):
            kept.append(section)
        elif path not in dropped[-1:]:  # a file that turned into a symbolic link has two sections
            dropped.append(path)
    return b"".join(kept), dropped


def _cut(patch: bytes) -> tuple[bytes, list[bytes]]:
    """Split a patch into the bytes before the first file's section, and the sections."""
    starts = [match.start() for match in _SECTION.finditer(patch)] + [len(patch)]
    return patch[: starts[0]], [patch[start:end] for start, end in itertools.pairwise(starts)]


def _named(section: bytes) -> str | None:
    """The path in a section's header if both sides have the same, else None."""
    names = section.split(b"\n", 1)[0].removeprefix(b"diff --git ")
    old, new = names[: len(names) // 2], names[len(names) // 2 + 1 :]
    if old.startswith(b'"') and old.endswith(b'"') and new.startswith(b'"'):
        old, new = (_ESCAPE.sub(_unescaped, side[1:-1]) for side in (old, new))
    if not (old.startswith(b"a/") and new.startswith(b"b/") and old[2:] == new[2:]):
        return None
    return os.fsdecode(old[2:])


def _unescaped(match: re.Match[bytes]) -> bytes:
    return _ESCAPED.get(match[1]) or bytes([int(match[1], 8) & 255])


def _section(root: Path, section: bytes) -> tuple[str, bytes | None]:
    """A section's path and the file's new content; None: the file is deleted. Raises NotPlain."""
    header = _HEADER.match(section)
    about = _PLAIN.match(section, header.end()) if header else None
    if header is None or about is None or header[1] != header[2]:
        raise NotPlain
    path, kind = header[1].decode(), about[1]
    if {".git", ".."} & set(PurePosixPath(path).parts) or str(PurePosixPath(path)) != path:
        raise NotPlain
    target = root / path
    if any((root / parent).is_symlink() for parent in [path, *PurePosixPath(path).parents]):
        raise NotPlain
    if (kind == b"new") == target.exists() or (target.exists() and not target.is_file()):
        raise NotPlain
    old = target.read_bytes().splitlines(keepends=True) if kind != b"new" else []
    if any(b"\r" in line or b"\x0b" in line or b"\x0c" in line for line in old):
        raise NotPlain  # bytes.splitlines splits at more than newlines
    new = _patched(old, section[about.end() :].split(b"\n"))
    if kind == b"deleted" and new:
        raise NotPlain
    return path, None if kind == b"deleted" else b"".join(new)


def _patched(old: list[bytes], lines: list[bytes]) -> list[bytes]:
    new: list[bytes] = []
    at, index = 0, 0
    while index < len(lines) - 1:
        hunk = _HUNK.match(lines[index])
        if hunk is None:
            raise NotPlain
        count = int(hunk[2] or 1)
        start = int(hunk[1]) - (1 if count else 0)
        if start < at:
            raise NotPlain
        new += old[at:start]
        index, taken, added = _hunk(lines, index + 1, count, int(hunk[3] or 1))
        if old[start : start + count] != taken:
            raise NotPlain
        new += added
        at = start + count
    return new + old[at:]


def _hunk(lines: list[bytes], index: int, before: int, after: int) -> tuple[int, list[bytes], list[bytes]]:
    """Read one hunk's body: (index after it, the old lines, the new lines). Raises NotPlain."""
    taken: list[bytes] = []
    added: list[bytes] = []
    while index < len(lines) - 1 and (len(taken) < before or len(added) < after):
        sign, text = lines[index][:1], lines[index][1:]
        index += 1
        if index < len(lines) - 1 and lines[index].startswith(b"\\ "):
            index += 1
        else:
            text += b"\n"
        if sign not in (b" ", b"-", b"+"):
            raise NotPlain
        if sign != b"+":
            taken.append(text)
        if sign != b"-":
            added.append(text)
    if (len(taken), len(added)) != (before, after):
        raise NotPlain
    return index, taken, added


def _store(root: Path, path: str, content: bytes | None) -> None:
    if content is None:
        (root / path).unlink()
        with contextlib.suppress(OSError):  # as git does: remove directories with their last file
            for parent in list(PurePosixPath(path).parents)[:-1]:
                (root / parent).rmdir()
        return
    make_parents(root, path)
    fd = open_in_root(root, path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
