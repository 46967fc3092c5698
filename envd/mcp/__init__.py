"""The tools of a sandbox over MCP, for agents that nobody here wrote: `python -m envd mcp`.

In: an MCP client, over standard streams or streamable HTTP. Out: tool calls of an envd server, in a sandbox of the
session's own. The names and schemas are those of envd.tools. Imports envd's client side only; needs the package `mcp`
(`pip install 'triplane[mcp]'`).
"""

from __future__ import annotations

import importlib
import sys


def run_mcp(arguments: list[str]) -> int:
    """Run the command with its arguments and return its exit code."""
    try:
        importlib.import_module("mcp.server.lowlevel")
    except ImportError:
        print("envd: the package mcp is missing: pip install 'triplane[mcp]'", file=sys.stderr)
        return 1
    command = importlib.import_module("envd.mcp.command")
    return int(command.run(arguments))
