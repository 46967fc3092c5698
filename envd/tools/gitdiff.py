"""Patches in git's format that `git apply` takes, made without git.

The same contents give the same bytes on every machine: hunks come from difflib, binary files are literal patches. A
patch beyond the bounds is `OVERSIZED` instead, which applies nowhere.
"""

from __future__ import annotations

import base64
import difflib
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha1
from typing import Literal

_CONTEXT = 3
_MAX_DIFFLIB_LINES = 2000
"""Beyond this many changed lines on both sides together difflib's quadratic search gives way to one plain hunk."""
MAX_EFFORT = 100_000_000
"""Of one patch: some five seconds of difflib at the worst. Beyond it, too, hunks are plain, so that no content makes a
patch fail.
"""
_NO_SHA = "0" * 40
MAX_DIFF_BYTES = 32 * 1024 * 1024
"""Size of the largest patch, in bytes: two fit into a frame, and memory for one is left in a sandbox whose disk is
full.
"""
MAX_DIFF_LINES = 1_000_000
"""Lines of the longest text file that a patch changes. A line costs memory however short it is."""
OVERSIZED = (
    f"envd: the final state is not kept: its patch is over {MAX_DIFF_BYTES} bytes, or {MAX_DIFF_LINES} lines of a"
    " file\n"
).encode()
"""In place of a patch beyond the bounds: the same bytes for any, and refused by whatever applies patches."""


class TooLarge(Exception):
    """A patch is beyond the bounds."""


@dataclass(frozen=True)
class Side:
    """A file or a link as it is on one side."""

    mode: str
    """100644, 100755, or 120000 of a link."""
    data: bytes
    """Content, or where a link points."""


Change = tuple[str, Side | None, Side | None]
"""A path, what was there and what is there; None: nothing."""


class Effort:
    """What difflib may cost for one patch, in steps of its inner loop, at the most; estimated before it starts."""

    def __init__(self, steps: int = MAX_EFFORT, *, strict: bool = False) -> None:
        """strict: raise TooLarge beyond it, for who wants to do this elsewhere; else what is left gets plain hunks."""
        self._left = steps
        self._strict = strict

    def allows(self, old: list[bytes], new: list[bytes]) -> bool:
        """Whether difflib may compare these lines; counts them."""
        counts = Counter(old)
        steps = sum(counts[line] for line in new) * min(len(old), len(new)) + len(old) + len(new)
        if steps <= self._left:
            self._left -= steps
            return True
        if self._strict:
            raise TooLarge
        return False


def patch_of(changes: Iterable[Change], effort: Effort | None = None) -> bytes:
    """The patch of all changes, in their order; OVERSIZED beyond the bounds.

    Raises TooLarge beyond a strict `effort` only.
    """
    strict = effort is not None
    effort = effort or Effort()
    patches: list[bytes] = []
    size = 0
    try:
        for path, before, after in changes:
            if before == after:
                continue
            patches.append(_file_patch(path, before, after, effort))
            size += len(patches[-1])
            if size > MAX_DIFF_BYTES:
                return OVERSIZED
    except TooLarge:
        if strict:
            raise
        return OVERSIZED
    return b"".join(patches)


def _file_patch(path: str, before: Side | None, after: Side | None, effort: Effort) -> bytes:
    if before and after and before.mode != after.mode and "120000" in (before.mode, after.mode):
        return _file_patch(path, before, None, effort) + _file_patch(path, None, after, effort)
    old_name, new_name = _quote("a/" + path), _quote("b/" + path)
    head = [b"diff --git " + old_name + b" " + new_name]
    shas = f"{_blob_sha(before)}..{_blob_sha(after)}"
    if before is None and after is not None:
        head.append(f"new file mode {after.mode}".encode())
    elif after is None and before is not None:
        head.append(f"deleted file mode {before.mode}".encode())
    elif before and after and before.mode != after.mode:
        head += [f"old mode {before.mode}".encode(), f"new mode {after.mode}".encode()]
    elif before:
        shas += f" {before.mode}"
    old, new = before.data if before else b"", after.data if after else b""
    if old == new:
        if not (before and after):
            head.append(f"index {shas}".encode())
        return b"\n".join(head) + b"\n"
    head.append(f"index {shas}".encode())
    if b"\0" in old or b"\0" in new:
        return b"\n".join(head) + b"\nGIT binary patch\n" + _literal(new) + b"\n" + _literal(old) + b"\n"
    if abs(len(old) - len(new)) > MAX_DIFF_BYTES or max(old.count(b"\n"), new.count(b"\n")) > MAX_DIFF_LINES:
        raise TooLarge
    head.append(b"--- " + (_tab(old_name) if before else b"/dev/null"))
    head.append(b"+++ " + (_tab(new_name) if after else b"/dev/null"))
    return b"\n".join(head) + b"\n" + b"".join(_hunks(_split(old), _split(new), effort))


def _hunks(old: list[bytes], new: list[bytes], effort: Effort) -> Iterator[bytes]:
    for group in _Matched(_opcodes(old, new, effort)).get_grouped_opcodes(_CONTEXT):
        i1, i2, j1, j2 = group[0][1], group[-1][2], group[0][3], group[-1][4]
        yield f"@@ -{_range(i1, i2)} +{_range(j1, j2)} @@\n".encode()
        for tag, a1, a2, b1, b2 in group:
            if tag == "equal":
                yield _block(b" ", old[a1:a2])
                continue
            yield _block(b"-", old[a1:a2])
            yield _block(b"+", new[b1:b2])


_Opcode = tuple[Literal["replace", "delete", "insert", "equal"], int, int, int, int]


class _Matched(difflib.SequenceMatcher[bytes]):
    """Opcodes that were found already, for difflib to cut into hunks."""

    def __init__(self, codes: list[_Opcode]) -> None:
        super().__init__(None, [], [])
        self._codes = codes

    def get_opcodes(self) -> list[_Opcode]:
        return self._codes


def _opcodes(old: list[bytes], new: list[bytes], effort: Effort) -> list[_Opcode]:
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    a, b = old[head : len(old) - tail], new[head : len(new) - tail]
    if len(a) + len(b) > _MAX_DIFFLIB_LINES or not effort.allows(a, b):
        middle: list[_Opcode] = [("replace", 0, len(a), 0, len(b))]
    else:
        middle = list(difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes())
    codes: list[_Opcode] = [("equal", 0, head, 0, head)] if head else []
    codes += [(tag, i1 + head, i2 + head, j1 + head, j2 + head) for tag, i1, i2, j1, j2 in middle]
    if tail:
        codes.append(("equal", len(old) - tail, len(old), len(new) - tail, len(new)))
    return codes


def _range(start: int, stop: int) -> str:
    count = stop - start
    return f"{start + 1 if count else start}" + ("" if count == 1 else f",{count}")


def _block(sign: bytes, lines: list[bytes]) -> bytes:
    block = sign.join([b"", *lines])
    return block + b"\n\\ No newline at end of file\n" if lines and not lines[-1].endswith(b"\n") else block


def _split(data: bytes) -> list[bytes]:
    lines = data.split(b"\n")
    return [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _literal(data: bytes) -> bytes:
    packed = zlib.compress(data, 9)
    if len(packed) > MAX_DIFF_BYTES:
        raise TooLarge
    out = [b"literal %d" % len(data)]
    for start in range(0, len(packed), 52):
        chunk = packed[start : start + 52]
        size = len(chunk) + (64 if len(chunk) <= 26 else 70)
        out.append(bytes([size]) + base64.b85encode(chunk, pad=True))
    return b"\n".join(out) + b"\n"


def _blob_sha(side: Side | None) -> str:
    if side is None:
        return _NO_SHA
    return sha1(b"blob %d\0" % len(side.data) + side.data, usedforsecurity=False).hexdigest()


def _tab(name: bytes) -> bytes:
    """Git ends an unquoted name that holds a space with a tab, so that its end can be found."""
    return name + b"\t" if b" " in name and not name.startswith(b'"') else name


def _quote(name: str) -> bytes:
    raw = os.fsencode(name)
    if all(0x20 <= byte < 0x7F and byte not in b'"\\' for byte in raw):
        return raw
    plain = {ord('"'): b'\\"', ord("\\"): b"\\\\", 10: b"\\n", 9: b"\\t"}
    out = (plain.get(byte) or (bytes([byte]) if 0x20 <= byte < 0x7F else b"\\%03o" % byte) for byte in raw)
    return b'"' + b"".join(out) + b'"'
