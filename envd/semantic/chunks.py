"""Cuts files into pieces that mean something: functions, methods and classes where the syntax is known, blocks of lines
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import tree_sitter
import tree_sitter_python

BLOCK_LINES = 40
"""Lines of a piece where no syntax says more; also of the pieces that longer ones are cut into."""
MAX_CHUNKS = 400
"""Of one file."""
_MAX_DEPTH = 30
_DEFINITIONS = {"function_definition", "class_definition"}


class Chunk(NamedTuple):
    """A piece of a file."""

    start: int
    """First line, from 1."""
    end: int
    """Last line."""
    name: str
    """What is defined there, with what encloses it; empty for plain lines."""
    text: str


@cache
def _python() -> tree_sitter.Parser:
    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_python.language()))


def _python_spans(data: bytes) -> list[tuple[int, int, str]]:
    """(first row, row after the last, name) of definitions, outermost first; rows from 0."""
    spans: list[tuple[int, int, str]] = []
    pending = [(tree_sitter.Parser(_python().language).parse(data).root_node, "", 0)]
    while pending and len(spans) < MAX_CHUNKS:
        node, above, depth = pending.pop()
        for child in node.children:
            inner = child.child_by_field_name("definition") if child.type == "decorated_definition" else child
            if inner is None or inner.type not in _DEFINITIONS:
                if depth < _MAX_DEPTH and child.child_count:
                    pending.append((child, above, depth + 1))
                continue
            named = inner.child_by_field_name("name")
            own = named.text.decode("utf-8", "replace") if named is not None and named.text else ""
            name = f"{above}.{own}" if above else own
            spans.append((child.start_point[0], child.end_point[0] + 1, name))
            body = inner.child_by_field_name("body")
            if inner.type == "class_definition" and body is not None and depth < _MAX_DEPTH:
                pending.append((body, name, depth + 1))
    return sorted(spans, key=lambda span: (span[0], -span[1]))


SYNTAX: dict[str, Callable[[bytes], list[tuple[int, int, str]]]] = {".py": _python_spans, ".pyi": _python_spans}
"""By suffix, what finds definitions. To add a language, add its tree-sitter grammar here."""


def chunks_of(path: str, data: bytes) -> list[Chunk]:
    """The pieces of a file, each line in at least one; none of a binary file."""
    if b"\0" in data:
        return []
    lines = data.decode("utf-8", "replace").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    find = next((find for suffix, find in SYNTAX.items() if path.endswith(suffix)), None)
    spans = find(data) if find else []
    found: list[Chunk] = []
    at = 0
    for number, (start, end, name) in enumerate(spans):
        inner = next((other[0] for other in spans[number + 1 :] if other[0] < end), end)
        found += _pieces(lines, at, start, "")  # what stands between definitions
        # A class is its head; its methods are pieces of their own.
        found += _pieces(lines, max(start, at), max(inner, start + 1) if inner < end else end, name)
        at = max(at, inner if inner < end else end)
    found += _pieces(lines, at, len(lines), "")
    return found[:MAX_CHUNKS]


def _pieces(lines: list[str], start: int, end: int, name: str) -> Iterator[Chunk]:
    end = min(end, len(lines))
    for at in range(start, end, BLOCK_LINES):
        until = min(at + BLOCK_LINES, end)
        text = "\n".join(lines[at:until])
        if text.strip():
            yield Chunk(at + 1, until, name, text)
