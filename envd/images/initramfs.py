"""Initial ramdisks: cpio archives in the kernel's "newc" form
(Documentation/driver-api/early-userspace/buffer-format.rst).

The kernel unpacks archives that stand behind each other, so a backend puts this envd's agent behind an image's own
ramdisk.
"""

from __future__ import annotations

import shutil
import stat
from pathlib import Path
from typing import BinaryIO

AGENT = "envd-guest"
"""The agent's name in the root of the ramdisk."""


def write_archive(target: Path, entries: list[tuple[str, int, bytes]]) -> None:
    """Write entries (path, mode with its type, content or a link's target) as one archive, padded to 512 bytes."""
    with target.open("wb") as out:
        for number, (path, mode, content) in enumerate(entries, start=1):
            _entry(out, number, path, mode, content)
        _entry(out, 0, "TRAILER!!!", 0, b"")
        out.write(bytes(-out.tell() % 512))


def directory(path: str) -> tuple[str, int, bytes]:
    """An entry for a directory."""
    return path, stat.S_IFDIR | 0o755, b""


def file(path: str, content: bytes, mode: int = 0o644) -> tuple[str, int, bytes]:
    """An entry for a file."""
    return path, stat.S_IFREG | mode, content


def with_agent(image: Path, agent: Path, target: Path) -> None:
    """Write an image's ramdisk with an agent's binary and the first program (init.sh) behind it."""
    extra = target.with_suffix(".agent")
    init = Path(__file__).with_name("init.sh").read_bytes()
    write_archive(extra, [file(AGENT, agent.read_bytes(), 0o755), file("init", init, 0o755)])
    with target.open("wb") as out:
        for part in (image, extra):
            with part.open("rb") as source:
                shutil.copyfileobj(source, out)
    extra.unlink()


def _entry(out: BinaryIO, number: int, path: str, mode: int, content: bytes) -> None:
    name = path.encode() + b"\0"
    fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name), 0)
    out.write(b"070701" + b"".join(b"%08X" % value for value in fields) + name)
    out.write(bytes(-out.tell() % 4))
    out.write(content)
    out.write(bytes(-out.tell() % 4))
