"""The workspace against its template as a git-format patch that `git apply` takes, without running git.

The same two trees give the same bytes on every machine: paths are sorted, hunks come from difflib, binary files are
literal patches. Files whose size, mode and modification time equal the template's are taken as unchanged. What the agent
itself can't read does not count. A patch beyond the bounds is `OVERSIZED` instead, which applies nowhere.
"""

from __future__ import annotations

import base64
import difflib
import os
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha1
from pathlib import Path

from envd.tools.files import HIDDEN

_CONTEXT = 3
_MAX_DIFFLIB_LINES = 2000
"""Beyond this many changed lines on both sides together difflib's quadratic search gives way to one plain hunk."""
_NO_SHA = "0" * 40
MAX_DIFF_BYTES = 32 * 1024 * 1024
"""Size of the largest patch, in bytes: two fit into a frame, and memory for one is left in a sandbox whose disk is full."""
MAX_DIFF_LINES = 1_000_000
"""Lines of the longest text file that a patch changes. A line costs memory however short it is."""
OVERSIZED = (
    f"envd: the final state is not kept: its patch is over {MAX_DIFF_BYTES} bytes, or {MAX_DIFF_LINES} lines of a file\n"
).encode()
"""In place of a patch beyond the bounds: the same bytes for any, and refused by whatever applies patches."""


@dataclass(frozen=True)
class Entry:
    """A file or a link of a tree. `stamp` tells cheaply whether it was touched."""

    mode: str
    stamp: tuple[int, int]


def tree_entries(root: Path) -> dict[str, Entry]:
    """Files and links below root by path, as git sees them: no empty directories, no devices, no `.git`."""
    return dict(_scan(str(root)))


def changed_paths(template: Path, workspace: Path) -> list[str]:
    """Sorted paths that differ in content or mode, appeared or disappeared."""
    return [path for path, _, _ in _changes(template, workspace)]


def workspace_diff(template: Path, workspace: Path) -> bytes:
    """The patch that turns the template into the workspace; empty when they are equal, OVERSIZED beyond the bounds."""
    patches: list[bytes] = []
    size = 0
    try:
        for path, before, after in _changes(template, workspace):
            patches.append(_file_patch(path, before, after))
            size += len(patches[-1])
            if size > MAX_DIFF_BYTES:
                return OVERSIZED
    except _TooLarge:
        return OVERSIZED
    return b"".join(patches)


class _TooLarge(Exception):
    """A file's patch alone is beyond the bounds."""


@dataclass(frozen=True)
class _Side:
    mode: str
    data: bytes


def _changes(template: Path, workspace: Path) -> Iterator[tuple[str, _Side | None, _Side | None]]:
    old, new = tree_entries(template), tree_entries(workspace)
    for path in sorted(old.keys() | new.keys()):
        if path in old and path in new and old[path] == new[path] and old[path].mode != "120000":
            continue
        before = _side(template, path, old.get(path))
        after = _side(workspace, path, new.get(path))
        if before != after:
            yield path, before, after


def _scan(root: str) -> Iterator[tuple[str, Entry]]:
    """Walk without recursion, since an agent may nest directories without end. What can't be read is left out."""
    pending = [(root, "")]
    while pending:
        directory, prefix = pending.pop()
        try:
            with os.scandir(directory) as found:
                entries = list(found)
        except OSError:
            continue  # locked by the agent itself, gone meanwhile, or too deep to name: its content can't count
        for entry in entries:
            if entry.name in HIDDEN:
                continue
            path = prefix + entry.name
            try:
                about = entry.stat(follow_symlinks=False)
            except OSError:
                continue  # as above: a directory may be listed and still not be entered
            stamp = (about.st_size, about.st_mtime_ns)
            if stat.S_ISDIR(about.st_mode):
                pending.append((entry.path, path + "/"))
            elif stat.S_ISLNK(about.st_mode):
                yield path, Entry("120000", stamp)
            elif stat.S_ISREG(about.st_mode):
                yield path, Entry("100755" if about.st_mode & 0o100 else "100644", stamp)


def _side(root: Path, path: str, entry: Entry | None) -> _Side | None:
    if entry is None:
        return None
    where = root / path
    try:
        data = os.fsencode(where.readlink()) if entry.mode == "120000" else _content(where)
    except OSError:
        return None
    return _Side(entry.mode, data)


def _content(where: Path) -> bytes:
    """A file's bytes. Never waits for a pipe that something in the background has put there since the walk."""
    with os.fdopen(os.open(where, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileNotFoundError(where)
        return file.read()


def _file_patch(path: str, before: _Side | None, after: _Side | None) -> bytes:
    if before and after and before.mode != after.mode and "120000" in (before.mode, after.mode):
        return _file_patch(path, before, None) + _file_patch(path, None, after)
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
        raise _TooLarge
    head.append(b"--- " + (_tab(old_name) if before else b"/dev/null"))
    head.append(b"+++ " + (_tab(new_name) if after else b"/dev/null"))
    return b"\n".join(head) + b"\n" + b"".join(_hunks(_split(old), _split(new)))


def _hunks(old: list[bytes], new: list[bytes]) -> Iterator[bytes]:
    for group in _grouped(_opcodes(old, new)):
        i1, i2, j1, j2 = group[0][1], group[-1][2], group[0][3], group[-1][4]
        yield f"@@ -{_range(i1, i2)} +{_range(j1, j2)} @@\n".encode()
        for tag, a1, a2, b1, b2 in group:
            if tag == "equal":
                yield _block(b" ", old[a1:a2])
                continue
            yield _block(b"-", old[a1:a2])
            yield _block(b"+", new[b1:b2])


_Opcode = tuple[str, int, int, int, int]


def _opcodes(old: list[bytes], new: list[bytes]) -> list[_Opcode]:
    head = 0
    while head < min(len(old), len(new)) and old[head] == new[head]:
        head += 1
    tail = 0
    while tail < min(len(old), len(new)) - head and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    a, b = old[head : len(old) - tail], new[head : len(new) - tail]
    if len(a) + len(b) > _MAX_DIFFLIB_LINES:
        middle: list[_Opcode] = [("replace", 0, len(a), 0, len(b))]
    else:
        middle = list(difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes())
    codes: list[_Opcode] = [("equal", 0, head, 0, head)] if head else []
    codes += [(tag, i1 + head, i2 + head, j1 + head, j2 + head) for tag, i1, i2, j1, j2 in middle]
    if tail:
        codes.append(("equal", len(old) - tail, len(old), len(new) - tail, len(new)))
    return codes


def _grouped(codes: list[_Opcode]) -> Iterator[list[_Opcode]]:
    """Cut opcodes into hunks with up to three lines of context, as unified diffs have them."""
    group: list[_Opcode] = []
    for index, (tag, i1, i2, j1, j2) in enumerate(codes):
        if tag != "equal":
            group.append((tag, i1, i2, j1, j2))
            continue
        last = index == len(codes) - 1
        if not group:
            skip = max(0, i2 - i1 - _CONTEXT)
            group = [] if last else [(tag, i1 + skip, i2, j1 + skip, j2)]
        elif last or i2 - i1 > 2 * _CONTEXT:
            keep = min(_CONTEXT, i2 - i1)
            yield [*group, (tag, i1, i1 + keep, j1, j1 + keep)]
            group = [] if last else [(tag, i2 - _CONTEXT, i2, j2 - _CONTEXT, j2)]
        else:
            group.append((tag, i1, i2, j1, j2))
    if group:
        yield group


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
        raise _TooLarge
    out = [b"literal %d" % len(data)]
    for start in range(0, len(packed), 52):
        chunk = packed[start : start + 52]
        size = len(chunk) + (64 if len(chunk) <= 26 else 70)
        out.append(bytes([size]) + base64.b85encode(chunk, pad=True))
    return b"\n".join(out) + b"\n"


def _blob_sha(side: _Side | None) -> str:
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
