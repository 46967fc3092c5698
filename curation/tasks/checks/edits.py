"""Replacing parts of a Python source text, its layout kept."""

from __future__ import annotations

import ast

from contracts.syntax import parse_python


class Source:
    """A file's text and where its syntax nodes stand in it."""

    def __init__(self, content: bytes) -> None:
        """Raises SyntaxError, ValueError or RecursionError for what is no Python in UTF-8."""
        text = content.decode()
        self.tree = parse_python(text)
        self._data = text.encode()
        self._starts = [0]
        for line in self._data.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Byte offsets of a node: its start, and the end after it."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self._starts[node.lineno - 1] + node.col_offset,
            self._starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(self, node: ast.expr | ast.stmt) -> str:
        """The text of a node."""
        start, end = self.span(node)
        return self._data[start:end].decode()

    def between(self, left: ast.expr, right: ast.expr) -> tuple[int, int, str]:
        """What stands between two nodes: start, end, text."""
        start, end = self.span(left)[1], self.span(right)[0]
        return start, end, self._data[start:end].decode()

    def edited(self, edits: dict[tuple[int, int], str]) -> bytes:
        """The file with these spans replaced. A span within another is ignored."""
        answer, at = bytearray(), 0
        for (start, end), text in sorted(edits.items(), key=lambda each: (each[0][0], -each[0][1])):
            if start < at:
                continue
            answer += self._data[at:start] + text.encode()
            at = end
        return bytes(answer + self._data[at:])
