"""Calls of connectors."""

from __future__ import annotations

from envd.client import ToolCall, ToolResult
from tests.envd.harness import Harness

ALL = "default+sql+http+browse+python"
"""A toolset with all of them."""


def sql(query: str, path: str = "a.db", **arguments: object) -> ToolCall:
    return ToolCall("sql", {"path": path, "query": query, **arguments})


def python(code: str, **arguments: object) -> ToolCall:
    return ToolCall("python", {"code": code, **arguments})


def browse(action: str, **arguments: object) -> ToolCall:
    return ToolCall("browse", {"action": action, **arguments})


def get(url: str, method: str = "GET", **arguments: object) -> ToolCall:
    return ToolCall("http", {"method": method, "url": url, **arguments})


def run(harness: Harness, *calls: ToolCall, timeout_s: float = 20, **options: object) -> list[ToolResult]:
    return harness.calls(*calls, timeout_s=timeout_s, **{"toolset": ALL, **options})


def texts(harness: Harness, *calls: ToolCall, **options: object) -> list[str]:
    return [each.text for each in run(harness, *calls, **options)]
