"""A forged final state: a diff that wants the verdict `solved` without the answer. Its function is wrong wherever no
test looks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tests.redteam.worlds import World

Content = str | bytes | None


@dataclass(frozen=True)
class Forgery:
    """One way to forge, for every task that `needs` allows."""

    name: str
    what: str
    """What it tries, in one line."""
    make: Callable[[World], bytes]
    """The diff for a task."""
    needs: frozenset[str] = frozenset()
    """What the task's hidden tests must use, or the attempt makes no sense."""
    family: str = ""
    tool: str = ""
    """A program that this machine needs to make it."""

    def suits(self, world: World) -> bool:
        """Whether it may be tried on this task, on this machine."""
        return world.has(self.needs) and (not self.tool or shutil.which(self.tool) is not None)


def module(name: str, what: str, code: str, needs: str = "") -> Forgery:
    """Code after the module under test. FN stands for the tested function, MOD for its module."""
    return Forgery(name, what, lambda world: world.diff({world.path: world.replaced(code)}), frozenset(needs.split()))


def files(name: str, what: str, changes: Mapping[str, Content], code: str = "", needs: str = "") -> Forgery:
    """Other files with the same stand-ins in their paths and texts, and code after the module under test."""

    def make(world: World) -> bytes:
        changed: dict[str, Content] = {
            world.filled(path): world.filled(content) if isinstance(content, str) else content
            for path, content in changes.items()
        }
        if code:
            changed[world.path] = world.replaced(code)
        return world.diff(changed)

    return Forgery(name, what, make, frozenset(needs.split()))


def built(name: str, what: str, make: Callable[[World], bytes], needs: str = "", tool: str = "") -> Forgery:
    """A diff that needs more than text."""
    return Forgery(name, what, make, frozenset(needs.split()), tool=tool)


def section(path: bytes, mode: str, text: bytes) -> bytes:
    """A new file as a patch's section, whatever its name and mode: what a tree of text can't hold."""
    lines = text.split(b"\n")
    body = b"".join(b"+" + line + b"\n" for line in lines[:-1])
    if lines[-1]:
        body += b"+" + lines[-1] + b"\n\\ No newline at end of file\n"
    count = len(lines) - (0 if lines[-1] else 1)
    quoted = _quoted(path)
    old, new = quoted(b"a/"), quoted(b"b/")
    head = b"diff --git %s %s\nnew file mode %s\nindex 0000000..3f2ff2d\n" % (old, new, mode.encode())
    return head + b"--- /dev/null\n+++ %s\n@@ -0,0 +1,%d @@\n" % (new, count) + body


def _quoted(path: bytes) -> Callable[[bytes], bytes]:
    """Git's spelling of a path: quoted with octal escapes where it must be."""
    plain = all(33 <= byte < 127 and byte not in b'"\\' for byte in path)

    def spelled(prefix: bytes) -> bytes:
        if plain:
            return prefix + path
        inner = b"".join(
            bytes([byte]) if 32 <= byte < 127 and byte not in b'"\\' else b"\\%03o" % byte for byte in path
        )
        return b'"' + prefix + inner + b'"'

    return spelled
