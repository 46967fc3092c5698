"""Replace parts of a Python source text and keep its layout."""

from __future__ import annotations

import ast
from codecs import BOM_UTF8

from contracts.syntax import has_lone_return, parse_python


class Source:
    """Text of a file with the positions of its syntax nodes."""

    def __init__(self, content: bytes) -> None:
        """Raise SyntaxError or ValueError for a file that is not Python in UTF-8, or has a carriage return without a
        newline. A byte order mark at its start is left out.
        """
        content = content.removeprefix(BOM_UTF8)
        if has_lone_return(content):
            raise ValueError("it has a carriage return without a newline")
        self.tree = parse_python(content.decode())
        self._data = content
        self._starts = [0]
        for line in self._data.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Byte offsets of a node's start and end."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(self, node: ast.expr | ast.stmt) -> str:
        """Text of a node."""
        start, end = self.span(node)
        return self._data[start:end].decode()

    def between(self, left: ast.expr, right: ast.expr) -> tuple[int, int, str]:
        """Range between two nodes: start, end, text."""
        start, end = self.span(left)[1], self.span(right)[0]
        return start, end, self._data[start:end].decode()

    def edited(self, edits: dict[tuple[int, int], str]) -> bytes:
        """File with these spans replaced; nested spans are ignored."""
        answer, at = bytearray(), 0
        for (start, end), text in sorted(edits.items(), key=lambda each: (each[0][0], -each[0][1])):
            if start < at:
                continue
            answer += self._data[at:start] + text.encode()
            at = end
        return bytes(answer + self._data[at:])
