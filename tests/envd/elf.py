"""The parts of ELF files that say how a program is hardened. Source: elf(5), the System V ABI's chapters 4 and 5, for
64-bit little-endian files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ET_DYN = 3
PT_LOAD, PT_DYNAMIC, PT_INTERP, PT_GNU_STACK, PT_GNU_RELRO = 1, 2, 3, 0x6474E551, 0x6474E552
PF_X, PF_W = 1, 2
DT_NEEDED, DT_TEXTREL, DT_FLAGS, DT_FLAGS_1 = 1, 22, 30, 0x6FFFFFFB
DF_BIND_NOW, DF_1_NOW, DF_1_PIE = 8, 1, 0x08000000
_SHT_SYMTAB = 2


@dataclass(frozen=True)
class Elf:
    """One program."""

    kind: int
    segments: tuple[tuple[int, int], ...]
    """Type and flags of each."""
    dynamic: tuple[tuple[int, int], ...]
    """Tag and value of each entry."""
    symbols: dict[str, bytes]
    """The first 16 bytes of what each named symbol stands for; empty for symbols of no section."""


def read_elf(path: Path) -> Elf:
    """Take a file apart. Raises ValueError where it is no such file."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{path} is no 64-bit little-endian ELF file")
    kind, _, _, _, programs, sections = struct.unpack_from("<HHIQQQ", data, 16)
    _, program_size, program_count, section_size, section_count, _ = struct.unpack_from("<HHHHHH", data, 52)
    headers = [struct.unpack_from("<IIQQQQQQ", data, programs + n * program_size) for n in range(program_count)]
    loaded = [(address, offset, size) for what, _, offset, address, _, size, _, _ in headers if what == PT_LOAD]
    dynamic = [
        struct.unpack_from("<qQ", data, at)
        for what, _, offset, _, _, size, _, _ in headers
        if what == PT_DYNAMIC
        for at in range(offset, offset + size, 16)
    ]
    tables = [struct.unpack_from("<IIQQQQIIQQ", data, sections + n * section_size) for n in range(section_count)]
    symbols = {
        name: next((data[offset + value - at :][:16] for at, offset, size in loaded if at <= value < at + size), b"")
        for table in tables
        if table[1] == _SHT_SYMTAB
        for name, value in _symbols(data, table, tables[table[6]][4])
    }
    return Elf(kind, tuple((what, flags) for what, flags, *_ in headers), tuple(dynamic), symbols)


def _symbols(data: bytes, table: tuple[int, ...], names: int) -> Iterator[tuple[str, int]]:
    for at in range(table[4], table[4] + table[5], 24):
        name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", data, at)
        yield data[names + name : data.index(b"\0", names + name)].decode(), value
