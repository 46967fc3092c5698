"""The tools an agent calls: one definition each, and pure functions that act on a workspace directory.

In: a workspace root and a `ToolCall`. Out: a `ToolResult` whose text depends on nothing but the two.
The server runs exactly these functions over a sandbox's agent, so scripted episodes rendered with `run_file_tool` read
the same as live ones, byte for byte. `exec`, `lint` and `semantic_search` run in a sandbox only. May be imported by any
plane.
"""

from envd.tools.files import run_file_tool
from envd.tools.output import MAX_OUTPUT_BYTES, Output
from envd.tools.paths import relative
from envd.tools.schemas import (
    ALL_TOOLS,
    DEFAULT_TOOLSET,
    SUBMIT_ANSWER,
    TOOLS,
    TOOLSETS,
    ToolSpec,
    check_arguments,
    toolset_named,
)

__all__ = [
    "ALL_TOOLS",
    "DEFAULT_TOOLSET",
    "MAX_OUTPUT_BYTES",
    "SUBMIT_ANSWER",
    "TOOLS",
    "TOOLSETS",
    "Output",
    "ToolSpec",
    "check_arguments",
    "relative",
    "run_file_tool",
    "toolset_named",
]
